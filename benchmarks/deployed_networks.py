"""Networks of the size that people ship, in Flax, and in float32 as ONNX operators for the runtime to fuse.

A model's method `written(writer, x)` writes it; images lie channels first there.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.float_onnx import Writer
from benchmarks.onnx_styles import Encoder
from experiments.models.mobilenet import ConvNorm, MobileNetV2
from experiments.models.recurrent import Recurrent


class MobileNet(MobileNetV2):
    """MobileNet V2 of full width, which can be written."""

    def written(self, w: Writer, x: str) -> str:
        """The same in float32."""

        def layer(x: str, part: ConvNorm) -> str:
            x = w.norm(w.conv(x, part.conv), part.bn)
            return x if part.act is None else w.add("Clip", x, w.constant(0.0), w.constant(6.0))

        x = layer(x, self.stem)
        for block in self.blocks:
            y = x
            for part in block.layers.layers:
                y = layer(y, part)
            x = w.add("Add", x, y) if block.residual else y
        return w.linear(w.add("GlobalAveragePool", layer(x, self.last)), self.head)


class Layers(nnx.Module):
    """An encoder of MiniLM's size: 6 layers of 384 with 12 heads, on vectors."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Encoder(384, 12, rngs=rngs) for _ in range(6)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x

    def written(self, w: Writer, x: str) -> str:
        """The same in float32."""
        for layer in self.layers:
            x = layer.written(w, x)
        return x


class Keywords(Recurrent):
    """A keyword spotter: two GRU layers of 128 over 49 frames of 40 features, 12 classes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(nnx.GRUCell, 40, 128, 2, 12, rngs=rngs)

    def written(self, w: Writer, x: str) -> str:
        """The same in float32, with ONNX's GRU."""
        x = w.add("Transpose", x, perm=[1, 0, 2])
        for layer in self.layers:
            cell: Any = layer.cell
            hidden = cell.hidden_features

            def gates(values: Any, hidden: int = hidden) -> np.ndarray:
                """Flax has reset, update, new; ONNX update, reset, new."""
                r, z, n = np.split(np.asarray(values), 3, axis=-1)
                return np.concatenate([z, r, n], axis=-1).T[None]

            bias = np.concatenate([gates(cell.dense_i.bias[...]), np.zeros((1, 3 * hidden), np.float32)], axis=-1)
            weights = (w.constant(gates(part.kernel[...])) for part in (cell.dense_i, cell.dense_h))
            x = w.add("GRU", x, *weights, w.constant(bias), hidden_size=hidden, linear_before_reset=1)
            x = w.add("Squeeze", x, w.integers(1))
        last = w.add("Slice", x, w.integers(-1), w.integers(2**31 - 1), w.integers(0))
        return w.linear(w.add("Squeeze", last, w.integers(0)), self.head)


NETWORKS: dict[str, tuple[Callable[..., nnx.Module], tuple[int, ...]]] = {
    "MobileNet V2, 96x96": (MobileNet, (96, 96, 3)),
    "MobileNet V2, 224x224": (MobileNet, (224, 224, 3)),
    "encoder, 6 layers of 384": (Layers, (128, 384)),
    "GRU keyword spotter": (Keywords, (49, 40)),
}
"""Name -> maker, shape of one input."""

EXAMPLES = 4
"""For calibration, and on which codes are compared."""


def made(name: str) -> tuple[Any, np.ndarray]:
    """A network in evaluation mode and random inputs, the same in every process."""
    make, shape = NETWORKS[name]
    model = make(rngs=nnx.Rngs(0))
    model.eval()
    return model, np.asarray(jax.random.normal(jax.random.key(1), (EXAMPLES, *shape)))
