"""The second and third network of MTCNN, which finds faces (Zhang et al., 2016), of facenet-pytorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from experiments.real import data, torch_file, weights
from experiments.real.network import Network, Outputs, batched, built, loaded, put, put_conv, put_dense


class PReLU(nnx.Module):
    """A slope for each channel."""

    def __init__(self, channels: int) -> None:
        self.slope = nnx.Param(jnp.full(channels, 0.25))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(x >= 0, x, x * self.slope)


def _pool(x: jax.Array, window: int) -> jax.Array:
    """Max pooling with stride 2 that keeps what does not fill a window, as torch's `ceil_mode` does."""
    for axis in (1, 2):
        # one more row of the last numbers changes no maximum; explicit padding of a pool is not in jax2onnx
        if (x.shape[axis] - window) % 2:
            x = jnp.concatenate([x, jax.lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)], axis=axis)
    return nnx.max_pool(x, window_shape=(window, window), strides=(2, 2))


class RNet(nnx.Module):
    """Images [n, 24, 24, 3] to the probability of a face, [n, 2], and corrections of its box, [n, 4]."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        shapes = ((3, 28, 3), (28, 48, 3), (48, 64, 2))
        self.convs = nnx.List(nnx.Conv(i, o, (k, k), padding="VALID", rngs=rngs) for i, o, k in shapes)
        self.dense = nnx.Linear(576, 128, rngs=rngs)
        self.slopes = nnx.List(PReLU(n) for n in (28, 48, 64, 128))
        self.face = nnx.Linear(128, 2, rngs=rngs)
        self.box = nnx.Linear(128, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _pool(self.slopes[0](self.convs[0](x)), 3)
        x = _pool(self.slopes[1](self.convs[1](x)), 3)
        x = self.slopes[2](self.convs[2](x))
        x = x.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
        x = self.slopes[3](self.dense(x))
        return jax.nn.softmax(self.face(x)), self.box(x)


class ONet(nnx.Module):
    """Images [n, 48, 48, 3] to the probability of a face, [n, 2], its box, [n, 4], and five landmarks, [n, 10]."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        shapes = ((3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2))
        self.convs = nnx.List(nnx.Conv(i, o, (k, k), padding="VALID", rngs=rngs) for i, o, k in shapes)
        self.dense = nnx.Linear(1152, 256, rngs=rngs)
        self.slopes = nnx.List(PReLU(n) for n in (32, 64, 64, 128, 256))
        self.face = nnx.Linear(256, 2, rngs=rngs)
        self.box = nnx.Linear(256, 4, rngs=rngs)
        self.landmarks = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = _pool(self.slopes[0](self.convs[0](x)), 3)
        x = _pool(self.slopes[1](self.convs[1](x)), 3)
        x = _pool(self.slopes[2](self.convs[2](x)), 2)
        x = self.slopes[3](self.convs[3](x))
        x = x.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
        x = self.slopes[4](self.dense(x))
        return jax.nn.softmax(self.face(x)), self.box(x), self.landmarks(x)


def _load(model: Any, file: str, dense: tuple[tuple[str, str], ...]) -> Any:
    tensors = torch_file.read(weights.file("facenet_pytorch", "data", file))
    for index, conv in enumerate(model.convs, start=1):
        put_conv(conv, tensors, f"conv{index}", (2, 3, 1, 0))
    for index, prelu in enumerate(model.slopes, start=1):
        put(prelu.slope, tensors[f"prelu{index}.weight"])
    for layer, name in dense:
        put_dense(getattr(model, layer), tensors, name)
    return loaded(model)


def load_rnet() -> RNet:
    """The network with its public weights."""
    return _load(built(RNet), "rnet.pt", (("dense", "dense4"), ("face", "dense5_1"), ("box", "dense5_2")))


def load_onet() -> ONet:
    """The network with its public weights."""
    heads = (("face", "dense6_1"), ("box", "dense6_2"), ("landmarks", "dense6_3"))
    return _load(built(ONet), "onet.pt", (("dense", "dense5"), *heads))


def images(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The patches as the network's input, shuffled once, and whether they show a face."""
    patches, face = data.faces()
    sized = [Image.fromarray(patch).resize((size, size), Image.Resampling.BILINEAR) for patch in patches]
    gray = (np.stack([np.asarray(patch) for patch in sized]).astype(np.float32) - 127.5) / 128
    order = np.random.default_rng(0).permutation(len(face))
    return np.repeat(gray[..., None], 3, axis=-1)[order], face[order]


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Area that two corrected boxes share, over the area that either covers; corrections in parts of the patch."""
    a, b = (corrections + np.array([0.0, 0.0, 1.0, 1.0]) for corrections in (a, b))
    low, high = np.maximum(a[:, :2], b[:, :2]), np.minimum(a[:, 2:], b[:, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=1)
    areas = [np.prod(np.maximum(box[:, 2:] - box[:, :2], 0), axis=1) for box in (a, b)]
    return shared / np.maximum(areas[0] + areas[1] - shared, 1e-9)


def _network(name: str, kind: str, model: RNet | ONet, file: str, size: int) -> Network:
    x, face = images(size)
    held_out = face[80:200]

    def score(outputs: Outputs, wanted: Outputs) -> float:
        found = outputs[0][:, 1] > 0.5
        overlaps = overlap(outputs[1], wanted[1])
        return 100 * float(np.mean(np.where(held_out, found * overlaps, ~found)))

    return Network(
        name=name,
        kind=kind,
        source=f"facenet-pytorch 2.6.0, {file}",
        model=model,
        calibration=batched(20, x[:80]),
        test=batched(40, x[80:200]),
        measure="faces accepted, weighted by box overlap with the float network, and other patches rejected",
        score=score,
    )


def rnet() -> Network:
    return _network("mtcnn-rnet", "CNN with PReLU, 24 x 24 pixels", load_rnet(), "rnet.pt", 24)


def onet() -> Network:
    return _network("mtcnn-onet", "CNN with PReLU, 48 x 48 pixels", load_onet(), "onet.pt", 48)
