"""Real inputs that ship in packages: photographs, speech with its annotation, text with its topic, faces."""

import dataclasses
import re
import wave
from pathlib import Path

import numpy as np
import sklearn
from PIL import Image

from experiments.real import weights

RATE = 16000
"""Samples per second of the recording."""

# No picture, and no other picture of the same thing, is in both lists.
CALIBRATION_PHOTOS = (
    "skimage/data/astronaut.png",
    "skimage/data/brick.png",
    "skimage/data/coins.png",
    "skimage/data/grass.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/retina.jpg",
    "sklearn/china.jpg",
    "skimage/data/ihc.png",
    *(
        f"foolbox/data/imagenet_{index:02}_{label}.jpg"
        for index, label in enumerate(
            (243, 559, 438, 990, 949, 853, 609, 609, 915, 455, 541, 630, 741, 471, 129, 99, 251, 22, 317, 305)
        )
    ),
)
TEST_PHOTOS = (
    "skimage/data/camera.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/gravel.png",
    "skimage/data/horse.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/rocket.jpg",
    "sklearn/flower.jpg",
)


def _photo(name: str) -> Image.Image:
    package, _, path = name.partition("/")
    if package == "sklearn":
        found = Path(sklearn.__file__).parent / "datasets" / "images" / path
    else:
        found = weights.file(package, *path.split("/"))
    return Image.open(found).convert("RGB")


def crops(names: tuple[str, ...], per_photo: int, size: int, seed: int) -> np.ndarray:
    """Square crops, uint8 [n, size, size, 3]: the first of each photograph is its centre, the others are drawn.

    A drawn crop covers 35 % to 100 % of the shorter side, as in the training of ImageNet's networks, and every second
    one is mirrored.
    """
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for name in names:
        photo = _photo(name)
        for index in range(per_photo):
            short = min(photo.size)
            side = short if index == 0 else int(short * rng.uniform(0.35, 1.0))
            free = [photo.size[axis] - side for axis in (0, 1)]
            left, top = (n // 2 for n in free) if index == 0 else (int(rng.integers(n + 1)) for n in free)
            crop = photo.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
            pixels = np.asarray(crop)
            found.append(pixels[:, ::-1] if index % 2 else pixels)
    return np.stack(found)


@dataclasses.dataclass(frozen=True)
class Speech:
    """A recording of a conversation: samples float32 in [-1, 1]; speaking: whether somebody does, per sample."""

    samples: np.ndarray
    speaking: np.ndarray


def speech() -> Speech:
    """Thirty seconds of the AMI corpus with the annotation of its speakers, which pyannote.audio ships."""
    with wave.open(str(weights.file("pyannote", "audio", "sample", "sample.wav"))) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise ValueError(f"sample.wav: expected 16-bit mono at {RATE} Hz, got {file.getparams()}.")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    speaking = np.zeros(len(samples), bool)
    for line in weights.file("pyannote", "audio", "sample", "sample.rttm").read_text().splitlines():
        begin, duration = (float(field) for field in line.split()[3:5])
        speaking[int(begin * RATE) : int((begin + duration) * RATE)] = True
    return Speech(samples, speaking)


def sentences() -> tuple[list[str], np.ndarray]:
    """Sentences of scikit-learn's descriptions of its data sets, and which description each is from."""
    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    texts: list[str] = []
    topics: list[int] = []
    for topic, path in enumerate(sorted(folder.glob("*.rst"))):
        plain = re.sub(r":\w+:`([^`<]*)[^`]*`", r"\1", path.read_text())
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", plain)]
        for paragraph in paragraphs:
            for sentence in re.split(r"(?<=[.?!]) +(?=[A-Z])", paragraph):
                words = sentence.split()
                if (
                    8 <= len(words) <= 40
                    and sentence.endswith(".")
                    and sum(w.isalpha() for w in words) > len(words) / 2
                ):
                    texts.append(sentence)
                    topics.append(topic)
    return texts, np.asarray(topics)


def faces() -> tuple[np.ndarray, np.ndarray]:
    """100 faces of Labeled Faces in the Wild and 100 patches without one: uint8 [200, 25, 25], and bool [200]."""
    images = np.load(weights.file("skimage", "data", "lfw_subset.npy"))
    return np.round(images * 255).astype(np.uint8), np.arange(len(images)) < 100
