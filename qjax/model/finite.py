"""Refuses NaN and infinity among the numbers of a quantized model, because they would become ordinary codes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.layers import Traced
from qjax.model.quantized_model import QuantizedModel


def check_finite(what: str, qmodel: QuantizedModel, traced: Traced) -> None:
    """Raise a ValueError that lists every parameter with NaN or infinity, and how many; tracers are not checked.

    Parameters and statistics must be finite. Other variables, such as a mask, may hold infinities, and what the call
    does not read is not checked.

    what: the function that refuses, for the message. traced: a call of the model in evaluation mode.
    """
    finite = {"/".join(path) for kind in (nnx.Param, nnx.BatchStat) for path in _paths(nnx.state(qmodel.model, kind))}
    read = {value for eqn in traced.program.equations for value in eqn.inputs}
    faults: list[str] = []
    for value, name, array, constant in zip(
        traced.program.inputs, traced.names, traced.args, traced.constant, strict=True
    ):
        if constant and value in read:
            faults += _fault(name, array, infinite=name in finite)
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(nnx.state(qmodel.quantizers))):
        for name, numbers in qmodel.quantizers.named().items():
            for key, array in numbers.items():
                faults += _fault(f"quantizer {name}, {key}", array, infinite=True)
    if faults:
        raise ValueError(
            f"{what}: expected finite parameters, got {'; '.join(faults)}. Go back to an earlier checkpoint and find "
            "the cause: a learning rate that is too large, a division by zero, or an overflow in float16."
        )


def parameter_faults(qmodel: QuantizedModel) -> list[str]:
    """Every parameter and statistic of the model with NaN or infinity, and how many."""
    found: list[str] = []
    for kind in (nnx.Param, nnx.BatchStat):
        state = nnx.state(qmodel.model, kind)
        for path, array in zip(_paths(state), jax.tree.leaves(nnx.to_pure_dict(state)), strict=True):
            found += _fault("/".join(path), array, infinite=True)
    return found


def check_bounds(traced: Traced) -> None:
    """Raise a ValueError for a clip, maximum or minimum with a NaN bound, and name its line."""
    for eqn in traced.read.walk():
        if eqn.primitive not in ("clamp", "max", "min"):
            continue
        bounds = [value.constant for value in eqn.inputs if value.is_float and value.constant is not None]
        if any(not isinstance(bound, Tracer) and np.isnan(np.asarray(bound, np.float32)).any() for bound in bounds):
            raise ValueError(
                f"quantize: {eqn.where}: {eqn.primitive!r} has the bound NaN, so every "
                "result is NaN. Expected numbers as bounds; to leave a side of jnp.clip open, pass None."
            )


def _fault(name: str, array: Any, *, infinite: bool) -> Iterable[str]:
    if isinstance(array, Tracer) or not jnp.issubdtype(array.dtype, jnp.floating):
        return
    host = np.asarray(array).astype(np.float32)
    nans, infs = int(np.isnan(host).sum()), int(np.isinf(host).sum())
    if nans or (infs and infinite):
        yield f"{name}: {nans} NaN and {infs} infinite of {host.size}"


def _paths(state: Any) -> Iterable[tuple[str, ...]]:
    for path, _ in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]:
        yield tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
