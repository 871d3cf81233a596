"""Real data that packages ship: Fashion-MNIST from Debian, and the digits of scikit-learn."""

import dataclasses
import gzip
import subprocess
from pathlib import Path

import numpy as np

from experiments.data import digits

PACKAGE = "dataset-fashion-mnist"
FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), Path(".weights/fashion-mnist"))
"""Where Debian's package puts its files, and where `fetch` does."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Images float32 [n, height, width, 1] in [0, 1]; labels int32 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def validation(self, share: float = 1 / 6) -> "Data":
        """The training images alone; the last of them are in the place of the test split: for choosing settings."""
        kept = len(self.train_images) - round(share * len(self.train_images))
        x, y = self.train_images, self.train_labels
        return Data(x[:kept], y[:kept], x[kept:], y[kept:])


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of bytes: a magic number, the sizes of the axes, the bytes."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: expected an IDX file of bytes, got one that starts with {raw[:4].hex()}.")
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", rank, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def fetch(folder: Path = FOLDERS[1]) -> Path:
    """Unpack Debian's package with Fashion-MNIST into `folder`, without installing it.

    Raises:
      RuntimeError: the package cannot be had on this machine.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.parent / "debian"
    scratch.mkdir(exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", "-qq", PACKAGE], cwd=scratch, check=True, capture_output=True, text=True)
        (package,) = scratch.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=scratch, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise RuntimeError(
            f"Fashion-MNIST: expected Debian's package {PACKAGE}, installed in {FOLDERS[0]} or to be had with apt-get. "
            f"Got: {said.strip()[:300]}. Elsewhere, put its four .gz files into {folder}."
        ) from error
    (scratch / "usr/share/datasets/fashion-mnist").rename(folder)
    return folder


def fashion() -> Data:
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747): 60,000 images to train on, 10,000 to test."""
    found = next((folder for folder in FOLDERS if folder.is_dir()), None) or fetch()
    parts: list[np.ndarray] = []
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        images = read_idx(found / f"{split}-images-idx3-ubyte.gz")
        labels = read_idx(found / f"{split}-labels-idx1-ubyte.gz")
        if images.shape != (count, 28, 28) or labels.shape != (count,):
            raise ValueError(f"{found}: expected {count} images of 28x28, got {images.shape} and {labels.shape}.")
        parts += [(images[..., None] / 255).astype(np.float32), labels.astype(np.int32)]
    return Data(*parts)


def small_digits() -> Data:
    """The digits of scikit-learn, for the quick form."""
    found = digits()
    return Data(found.train_images, found.train_labels, found.test_images, found.test_labels)


DATA = {"fashion": fashion, "digits": small_digits}
"""Name -> how it is read."""
