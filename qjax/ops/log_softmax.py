"""Log-softmax and logsumexp of codes: `jax.nn.log_softmax`, `jax.nn.logsumexp` and equivalent programs.

Inputs are codes, then masks. True means that the element is part of the sum, unless the mask is inverted. A row with
all elements hidden counts as a row without a mask.
"""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.gemmlowp_log_softmax import LogGemmlowp, prepare_log
from qjax.numerics.gemmlowp_log_softmax import log_softmax as gemmlowp_log_softmax
from qjax.numerics.integer_logsumexp import LOG_BITS, log_sums, logarithms
from qjax.numerics.integer_softmax import exponentials
from qjax.numerics.softfloat import Real
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Preparation,
    Prepared,
    Quantized,
    Role,
    Shape,
    Site,
    real,
    register,
)
from qjax.ops.epilogue import clamp_codes, finish_sum, fold_sum, greatest_shift
from qjax.ops.facts import ChoosesNoPlace, always, hides_low
from qjax.ops.fields import Axes, Natural, Rounded
from qjax.ops.float_accumulator import Pending
from qjax.ops.masked_rows import Masked, attributes_of, taking_part, visible, works_along

_LOG_STEP = 2.0**-LOG_BITS
_CODE_BITS = 30


class _LogSum(ChoosesNoPlace, Op):
    """Two integers per number, d of the codes and l of the logarithm, added in 64 bits and rounded once.

    attributes: axes are those that are summed. places is the number of bits by which d is shifted to the left, so that
    it stays below 2^30 and both integers have about the same number of bits. The result is `sign * (d s_x + l 2^-25) /
    s_y`, where |d s_x| is at most R = s_x (qmax - qmin), the width of the input's range.

    The result is within `1/2 + 2^-14 + (2^-21 + n 2^-30 + R 2^-28) / s_y` steps of the real function of n codes, n
    below 2^29: the logarithm is off by 2^-22 + n 2^-30 (see `numerics.integer_logsumexp`), and rounding the factors of
    d and l moves the sum by twice the greater of their steps, R 2^-29 and 2^-25, or by 2^-14 steps of y if their shift
    has reached its limit.
    """

    role = Role.PRODUCER
    keeps_batch = always
    takes_steps = True

    def accumulator(self, site: Site) -> Bounds | None:
        # the sums are int64
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return works_along(attributes)

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(range(1, len(constant)))

    sign: ClassVar[int]

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and "axes" in eqn.params

    def prepare(self, given: Preparation) -> Prepared:
        x, y = given.inputs[0], given.output
        assert x.qmin is not None
        assert x.qmax is not None
        span = x.qmax - x.qmin
        places = _CODE_BITS - span.bit_length()
        of_codes = Real.of(x.scale).scale_by_power_of_two(np.int32(-places))
        steps = [of_codes, Real.of(np.float32(_LOG_STEP))]
        steps = [-step if self.sign < 0 else step for step in steps]
        folded = fold_sum(steps, y.scale, given.affine, greatest_shift(y.qmin, y.qmax))
        tables = {"table": exponentials(x.scale, span + 1), "logarithms": logarithms()}
        return Prepared({**tables, **folded}, {"places": places, "rounding": given.target.rounding.value})

    def restated(self, given: Preparation) -> Prepared | None:
        if "factor0" not in given.constants:
            return self.prepare(given)
        # the target only decides the rounding
        return Prepared(given.constants, {"rounding": given.target.rounding.value})

    def arithmetic(self, attributes: Attributes) -> str:
        return f"tables of exponentials and logarithms, one rounding ({attributes['rounding']})"


class PreparedFields(Rounded):
    """places: fractional bits of the logarithms."""

    places: Natural


class Fields(Axes, Masked):
    """axes: the exponentials are summed over these; masks as in `ops.masked_rows`."""


class OwnFields(Fields):
    """is_operator: whether it is LOG_SOFTMAX of a .tflite file, for which a target may have its own kernel."""

    is_operator: NotRequired[bool]


class OwnPreparedFields(TypedDict):
    """method: "gemmlowp", the computation of a runtime; the others belong to the exact one, see `PreparedFields`."""

    method: NotRequired[str]
    places: NotRequired[int]
    rounding: NotRequired[str]


@register
class LogSoftmax(_LogSum):
    """y = x - log(sum(exp(x))) over some axes.

    attributes: those of `_LogSum`. An operator of a file, under a target that computes its softmax by gemmlowp's
    functions, has the attribute method instead: see `numerics.gemmlowp_log_softmax`.
    """

    name = "log_softmax"
    fields = OwnFields
    prepared = OwnPreparedFields
    primitives = ("log_softmax",)
    sign = -1

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": [int(axis) for axis in eqn.params["axes"]], **attributes_of(eqn)}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *masks = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(*map(real, inputs))
        axes, values = tuple(eqn.params["axes"]), x.real32()
        if masks:
            y = values - jax.nn.logsumexp(visible(self.attributes(eqn), masks, values), axis=axes, keepdims=True)
        else:
            y = jax.nn.log_softmax(values, axis=axes)
        return [Pending.of_real(y, eqn.out_dtypes[0])]

    def prepare(self, given: Preparation) -> Prepared:
        if not given.attributes.get("is_operator") or given.target.softmax != "gemmlowp":
            return super().prepare(given)
        made = prepare_log(np.float32(np.asarray(given.inputs[0].scale).reshape(())))
        return Prepared({name: np.asarray(c) for name, c in made._asdict().items()}, {"method": "gemmlowp"})

    def arithmetic(self, attributes: Attributes) -> str:
        if "method" in attributes:
            return f"log-softmax of {attributes['method']}"
        return super().arithmetic(attributes)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x = inputs[0]
        if "method" in attributes:
            made = LogGemmlowp(*(jnp.asarray(constants[name]) for name in LogGemmlowp._fields))
            return clamp_codes(gemmlowp_log_softmax(x, made), constants).astype(attributes["dtype"])
        greatest, logs = _sums(attributes, constants, inputs)
        below = jnp.broadcast_to(greatest, x.shape) - x.astype(jnp.int32)
        return finish_sum([below << np.int32(attributes["places"]), logs], constants, attributes)


class KeepFields(Fields):
    """keep: whether the axes remain, with one element."""

    keep: bool


@register
class LogSumExp(_LogSum):
    """y = log(sum(exp(x))) over some axes; the attribute keep tells whether they remain, with one element each."""

    name = "logsumexp"
    fields = KeepFields
    prepared = PreparedFields
    primitives = ("logsumexp",)
    hides = hides_low
    sign = 1

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        own = {"axes": [int(axis) for axis in eqn.params["axes"]], "keep": bool(eqn.params["keep"])}
        return {**own, **attributes_of(eqn)}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *masks = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(*map(real, inputs))
        axes, values = tuple(eqn.params["axes"]), x.real32()
        values = visible(self.attributes(eqn), masks, values) if masks else values
        y = jax.nn.logsumexp(values, axis=axes, keepdims=eqn.params["keep"])
        return [Pending.of_real(y, eqn.out_dtypes[0])]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        greatest, logs = _sums(attributes, constants, inputs)
        zero_point = jnp.broadcast_to(jnp.asarray(constants["zero_point0"]), greatest.shape)
        parts = [(greatest - zero_point) << np.int32(attributes["places"]), logs]
        if not attributes["keep"]:
            parts = [jnp.squeeze(part, axis=tuple(attributes["axes"])) for part in parts]
        return finish_sum(parts, constants, attributes)


def _sums(attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x, *masks = inputs
    tables = jnp.asarray(constants["table"]), jnp.asarray(constants["logarithms"])
    mask = taking_part(attributes, masks, x.shape) if masks else None
    return log_sums(x, *tables, tuple(attributes["axes"]), mask)
