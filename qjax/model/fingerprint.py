"""Records in a saved state which plan it belongs to, so that restoring it into another plan is an error.

The names and shapes of a quantized model's numbers cannot tell 8 bits from 4. The state therefore holds one row of
integers per quantizer, which `nnx.update` and every eager use of the model compare with the model's own plan. Nothing
is compared inside `jit`.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.calibration import estimators
from qjax.calibration.learned import Quantizer

_METHODS = estimators()
_FIELDS = ("bits", "signed", "symmetric", "narrow_range", "method", "axis and groups")
_SHOWN = 3
"""How many differences a message lists."""


class QuantPlan(nnx.Variable):
    """uint32 [quantizers, fields]: the fingerprint of the plan that a state belongs to; it is never trained.

    Examples:
      ```python
      # holds the fingerprint, so that a state for another recipe is refused
      state = nnx.state(qmodel)
      nnx.update(qmodel, state)
      ```
    """

    @property
    def expected(self) -> np.ndarray:
        """The plan's own rows, which stay readable after a step to which the state was donated."""
        return np.frombuffer(self.get_metadata("rows"), np.uint32).reshape(-1, 1 + len(_FIELDS))

    def update_from_state(self, variable_state: Any) -> None:
        """Take the value of a restored state, or raise if it belongs to another plan."""
        given = variable_state.get_raw_value()
        if given is not self.get_raw_value():
            compare(self.get_metadata("quantizers"), self.expected, given)
        super().update_from_state(variable_state)


def fingerprint(quantizers: Mapping[str, Quantizer]) -> QuantPlan:
    """The fingerprint of a model with these quantizers."""
    made = rows(quantizers)
    return QuantPlan(jnp.asarray(made), quantizers=tuple(quantizers), rows=made.tobytes())


def rows(quantizers: Mapping[str, Quantizer]) -> np.ndarray:
    """uint32 [quantizers, fields]: a hash of each name, and the settings that a message can report."""
    found = [_row(name, quantizer) for name, quantizer in quantizers.items()]
    return np.asarray(found, np.uint32).reshape(-1, 1 + len(_FIELDS))


def _row(name: str, quantizer: Quantizer) -> list[int]:
    spec = quantizer.spec
    grain = repr((spec.axis, spec.group_size, spec.group_axis))
    kept = [spec.bits, spec.signed, spec.symmetric, bool(spec.narrow_range), _method(quantizer)]
    return [_number(name), *map(int, kept), 0 if spec.per_tensor else _number(grain)]


def _method(quantizer: Quantizer) -> int:
    """The index of a known method, or for another estimator a hash of its name beyond those indices."""
    if quantizer.method in _METHODS:
        return _METHODS.index(quantizer.method)
    return _number(quantizer.estimator.name) | 2**31


def compare(names: tuple[str, ...], own: np.ndarray, given: Any) -> None:
    """Raise if a state belongs to another plan; numbers that cannot be read now are not compared.

    Args:
      names: of the model's quantizers. own, given: the fingerprints of the model and of the state.
    """
    theirs = _read(given)
    # A stack of states, as under vmap, has leading axes.
    if theirs is None or theirs.ndim != 2 or np.array_equal(own, theirs):
        return
    found = {int(row[0]): row for row in theirs}
    differences: list[str] = []
    for name, row in zip(names, own, strict=True):
        other = found.pop(int(row[0]), None)
        if other is None:
            differences.append(f"{name!r} is not in the state")
            continue
        for field, expected, came in zip(_FIELDS, row[1:], other[1:], strict=False):
            if expected != came:
                here, there = _describe_field(field, expected), _describe_field(field, came)
                differences.append(f"{name!r}: {here} in the model, {there} in the state")
    if found:
        differences.append(f"the state has {len(found)} quantizers that the model lacks")
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise ValueError(
        "Expected a state of this quantized model, got one of a model with other quantizers: "
        f"{'; '.join(differences[:_SHOWN]) or 'their order differs'}{more}. Quantize the model with the recipe that "
        "the state was saved under, and restore it there."
    )


def _read(value: Any) -> np.ndarray | None:
    """The numbers, or None inside a trace and for arrays that other processes hold."""
    if isinstance(value, (Tracer, jax.ShapeDtypeStruct)) or not hasattr(value, "shape"):
        return None
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        return None
    return np.asarray(value)


def _describe_field(field: str, value: Any) -> str:
    if field == "bits":
        return f"{value} bits"
    if field == "method":
        known = int(value) < len(_METHODS)
        return f"method {_METHODS[int(value)]!r}" if known else f"an estimator of its own (#{int(value):08x})"
    if field == "axis and groups":
        return "one scale per tensor" if value == 0 else f"scales along other axes (#{int(value):08x})"
    return field if value else f"not {field}"


def _number(text: str) -> int:
    """A 32-bit hash of a text that is the same in every process."""
    return zlib.crc32(text.encode())
