"""Requantizes a sum by one multiplication, addition and shift, see `emit.requantize_as_shift`.

    codes = (sum * multiplier + offset) >> shift

A rule's own kernel takes several steps, each of which rounds or saturates. Here they are one step, which is proven to
compute the same codes for every sum that the weights allow.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.export.emit.c.jaxprs import trace
from qjax.export.emit.c.values import Table, Value
from qjax.export.emit.elementwise_as_shift import clamped_floor
from qjax.export.emit.requantizations import Finish
from qjax.numerics.rules import Rule

_MOST_RAISED = 4


def pays(finish: Finish, rule: Rule) -> bool:
    """Whether this form is shorter than the rule in plain loops; for float rules it is, as they are emulated.

    The fixed-point rules need fewer instructions of a Cortex-M than this form, whose sum has 64 bits.
    """
    line = finish.line
    if line is None:
        return False
    in_floats = any("mantissa" in field for field in rule.fields)
    return in_floats and line.kink is None and (line.raised is None or len(line.raised) <= _MOST_RAISED)


def finished(finish: Finish, dtype: str) -> Callable[[Value], Value]:
    """A function from the sums to the codes of a dtype, in this form."""
    line = finish.line
    if line is None:
        raise ValueError("expected a rule that is one multiplication and shift; see `pays`.")
    narrow = max(line.product, (abs(line.most) + 1) << line.shift) < 2**31
    wide = np.int32 if narrow else np.int64
    vectors = {
        "factor": line.factor.astype(np.int32 if np.all(abs(line.factor) < 2**31) else np.int64),
        "offset": line.offset.astype(wide),
    }
    if line.kink is not None and line.below is not None:
        vectors.update(kink=line.kink.astype(np.int32), below=line.below.astype(wide))
    if line.raised is not None:
        vectors.update({f"raised{row}": numbers.astype(np.int32) for row, numbers in enumerate(line.raised)})
    # a number that all channels share is written into the function
    shared = {role: vector[0] for role, vector in vectors.items() if vector.size and np.all(vector == vector[0])}
    tables = {
        role: Table(finish.shape, vector.dtype.name, vector.reshape(finish.shape), role)
        for role, vector in vectors.items()
        if role not in shared
    }

    def codes(acc: jax.Array, **given: jax.Array) -> jax.Array:
        with jax.enable_x64(True):

            def constant(role: str) -> Any:
                return jnp.broadcast_to(jnp.asarray(given.get(role, shared.get(role))), acc.shape)

            x = acc
            if line.raised is not None:
                late = acc == constant("raised0")
                for row in range(1, len(line.raised)):
                    late = late | (acc == constant(f"raised{row}"))
                x = acc + late.astype(np.int32)
            offset = constant("offset")
            if line.kink is not None:
                offset = jnp.where(x < constant("kink"), constant("below"), offset)
            total = x.astype(wide) * constant("factor").astype(wide) + offset
            return clamped_floor(total, line).astype(dtype)

    def value(acc: Value) -> Value:
        with jax.enable_x64(True):
            return trace(codes, {"acc": acc, **tables})

    return value
