"""The networks: public pretrained ones, calibrated or after `post_training`; and trained ones of few bits."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA
from experiments.accuracy.methods import SETTINGS as TRAINED
from experiments.accuracy.methods import Start, learned
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy
from experiments.real.methods import SETTINGS as POST
from experiments.real.methods import recipe
from experiments.real.network import Network, Outputs, batched
from experiments.real.networks import NETWORKS


@dataclasses.dataclass(frozen=True)
class Case:
    """A quantized model and how it is judged.

    qmodel: in evaluation mode. sample: what `convert` takes. test: batches of arguments. decide: outputs -> integers
    [n, ...], what the user acts on. score: outputs -> percent.
    """

    qmodel: Any
    sample: tuple[Any, ...]
    test: Sequence[tuple[np.ndarray, ...]]
    decide: Callable[[Outputs], np.ndarray]
    score: Callable[[Outputs], float]


def _class(outputs: Outputs) -> np.ndarray:
    """The class with the highest score."""
    return outputs[0].argmax(-1)


def _face(outputs: Outputs) -> np.ndarray:
    """Face or not, of the output with two columns."""
    (found,) = (out for out in outputs if out.shape[-1] == 2)
    return found.argmax(-1)


def _speech(outputs: Outputs) -> np.ndarray:
    """Whether a chunk is speech."""
    return (outputs[0] > 0.5).astype(np.int64)


def _nearest(outputs: Outputs) -> np.ndarray:
    """The nearest other sentence by cosine."""
    vectors = outputs[0] / np.linalg.norm(outputs[0], axis=-1, keepdims=True)
    near = vectors @ vectors.T
    np.fill_diagonal(near, -np.inf)
    return near.argmax(-1)


DECISIONS: dict[str, Callable[[Outputs], np.ndarray]] = {
    "efficientnet-lite0": _class,
    "mtcnn-rnet": _face,
    "mtcnn-onet": _face,
    "crepe-tiny": _class,
    "silero-vad": _speech,
    "minilm": _nearest,
}
"""Pretrained network -> what is decided by its outputs."""


@functools.lru_cache(maxsize=1)
def _pretrained(name: str) -> Network:
    return NETWORKS[name]()


def pretrained(name: str, setting: str, folder: Path) -> Case:
    """8 bits are calibrated, as a first try has it. Fewer bits need `post_training` to be of use."""
    del folder
    network = _pretrained(name)
    bits = POST[setting]
    if setting == "W8A8":
        qmodel = qjax.quantize(network.model, recipe(bits), network.calibration[0])
        qjax.calibrate(qmodel, network.calibration, progress=False)
    else:
        qmodel = qjax.post_training(network.model, recipe(bits), network.calibration, progress=False)
    qmodel.eval()
    wanted = _outputs(network.model, network.test)
    return Case(
        qmodel, network.calibration[0], network.test, DECISIONS[name], lambda found: network.score(found, wanted)
    )


def _outputs(model: Any, batches: Sequence[tuple[np.ndarray, ...]]) -> Outputs:
    found = [jax.tree.leaves(model(*batch)) for batch in batches]
    return tuple(np.concatenate([np.asarray(out) for out in column]) for column in zip(*found, strict=True))


EPOCHS = {"fashion": 2, "digits": 20}
"""Of the quantized training, by data."""


def trained(name: str, setting: str, folder: Path) -> Case:
    """Quantization-aware training from the float weights; first and last layer at 8 bits."""
    task = TASKS[name]
    data, epochs = DATA[task.data](), EPOCHS[task.data]
    start = Start(float_model(name, task, data, 0, folder), data, TRAINED[setting], epochs, 1000, task.rate)
    qmodel = learned(start).model
    labels = data.test_labels
    test = batched(min(500, len(data.test_images)), data.test_images)
    return Case(qmodel, (data.test_images[:4],), test, _class, lambda found: accuracy(found[0], labels))


CASES: dict[tuple[str, str], Callable[..., Case]] = {
    **{(name, setting): pretrained for name in DECISIONS for setting in ("W8A8", "W4A8")},
    **{
        (name, setting): trained
        for name in ("CNN on digits", "ResNet", "depthwise CNN", "GRU", "transformer")
        for setting in ("W8A8", "W4A4", "W2A2")
    },
}
"""(network, setting) -> its maker, called with both and the folder of float models."""
