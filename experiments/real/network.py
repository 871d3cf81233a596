"""What the command knows about one network."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)

Outputs = tuple[np.ndarray, ...]
"""What the network returns for all examples: a tuple, also of one."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A public pretrained network in plain Flax, with real inputs.

    name: short, unique. kind: what it is, in a few words. source: the package and the file of its weights.
    model: the float network in evaluation mode. calibration, test: batches, tuples of the call's arguments; no example
    is in both. measure: what `score` measures, in words. score: from the outputs for `test` and the float network's,
    a number in percent; 100 is perfect.
    """

    name: str
    kind: str
    source: str
    model: nnx.Module
    calibration: Sequence[tuple[np.ndarray, ...]]
    test: Sequence[tuple[np.ndarray, ...]]
    measure: str
    score: Callable[[Outputs, Outputs], float]


def batched(size: int, *arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Batches of one size; what does not fill the last one is left out, so that every call has one shape."""
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]) - size + 1, size)]


def built(kind: type[Model]) -> Model:
    """A network without numbers, at once: drawing weights that are replaced anyway takes long."""
    return nnx.eval_shape(lambda: cast("Any", kind)(rngs=nnx.Rngs(0)))


def loaded(model: Model) -> Model:
    """The network in evaluation mode, when every parameter has its number; one without is an error."""
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.RngState):
            variable.set_value(jax.random.key(0) if isinstance(variable, nnx.RngKey) else jnp.zeros((), jnp.uint32))
        elif isinstance(variable, nnx.Variable) and isinstance(variable.get_value(), jax.ShapeDtypeStruct):
            raise ValueError(f"Expected weights for {'/'.join(map(str, path))}, got none.")
    model.eval()
    return model


def put(variable: Any, value: np.ndarray) -> None:
    """Give a parameter its number; another shape is an error."""
    if variable.shape != value.shape:
        raise ValueError(f"Expected weights of shape {variable.shape}, got {value.shape}.")
    variable.set_value(jnp.asarray(value, jnp.float32))


def put_norm(norm: Any, tensors: dict[str, np.ndarray], name: str) -> None:
    """A batch norm of torch."""
    put(norm.scale, tensors[f"{name}.weight"])
    put(norm.bias, tensors[f"{name}.bias"])
    put(norm.mean, tensors[f"{name}.running_mean"])
    put(norm.var, tensors[f"{name}.running_var"])


def put_conv(conv: nnx.Conv, tensors: dict[str, np.ndarray], name: str, axes: tuple[int, ...]) -> None:
    """A convolution of torch, whose kernel is transposed to Flax's order of axes; the bias if the layer has one."""
    put(conv.kernel, tensors[f"{name}.weight"].transpose(axes))
    if conv.bias is not None:
        put(conv.bias, tensors[f"{name}.bias"])


def put_dense(dense: nnx.Linear, tensors: dict[str, np.ndarray], name: str) -> None:
    """A dense layer of torch."""
    put(dense.kernel, tensors[f"{name}.weight"].T)
    put(dense.bias, tensors[f"{name}.bias"])
