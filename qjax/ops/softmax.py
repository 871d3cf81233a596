"""Softmax of codes, with or without a mask: `jax.nn.softmax` and equivalent programs."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import softmax as runtimes
from qjax.numerics._namespace import traced
from qjax.numerics.integer_softmax import BITS, exponentials, shares
from qjax.numerics.positive_sums import MOST_TERMS
from qjax.numerics.softfloat import Real
from qjax.ops import softmax_parts
from qjax.ops.base import (
    Array,
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Operand,
    Preparation,
    Prepared,
    Quantized,
    Role,
    Shape,
    Site,
    Unit,
    real,
    register,
)
from qjax.ops.composed import Part, Steps
from qjax.ops.epilogue import clamp_codes, finish_sum, fold_sum, greatest_shift
from qjax.ops.facts import ChoosesNoPlace, always, hides_low
from qjax.ops.fields import Axes
from qjax.ops.float_accumulator import Pending
from qjax.ops.masked_rows import FILL, Masked, attributes_of, taking_part, works_along

_STEP = np.float32(2.0**-BITS)
_WIDE = "gemmlowp_int16"
"""gemmlowp's softmax with an int16 result: the zero point is -32768, and the scale 2^-16 up to one in a thousand."""
_FIELDS = {
    "gemmlowp": runtimes.Gemmlowp,
    "float32": runtimes.Table,
    "uint16": runtimes.Uint16,
    "onnx": runtimes.Onnx,
    _WIDE: runtimes.Gemmlowp,
}


class PreparedFields(TypedDict):
    """method: "exact", or the name of a runtime's own. rounding: of the exact one."""

    method: str
    rounding: NotRequired[str]


class Fields(Axes, Masked):
    """empty: the result of a row with all elements hidden; masks as in `ops.masked_rows`."""

    empty: NotRequired[str]


@register
class Softmax(ChoosesNoPlace, Op):
    """y = exp(x) / sum(exp(x)) over some axes; inputs: codes, then masks (True: included, unless inverted).

    attributes: axes are those over which the exponentials are summed, and method names the arithmetic. With masks,
    mask_axes lists for each mask and each axis of the codes the mask's axis or None, and mask_inverted tells whether
    True hides an element. empty is the result of a row whose elements are all hidden: "uniform" is the same share for
    each, as in JAX if masked numbers are replaced by a large negative number, and "zero" is that of
    `jax.nn.softmax(where=)`.

    A target's own method (`Target.softmax`) is defined for 8-bit codes over the last axis without a mask. TFLite's
    methods have the fixed scale 1/256, and "uint16" is for int8 codes only. "gemmlowp_int16" is "gemmlowp" of int8
    codes with a result of int16. Everything else is "exact", whose result is within `1/2 + (n + 3) / (2^31 s_y) +
    2^-15` steps of the exact softmax of n codes; see `numerics.integer_softmax`.
    """

    name = "softmax"
    may_be_probabilities = True
    exponential = True
    hides = hides_low
    fields = Fields
    prepared = PreparedFields
    role = Role.PRODUCER
    primitives = ("softmax",)
    takes_steps = False
    wide_zero_point = -(2**15)
    keeps_batch = always

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and "axes" in eqn.params

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(range(1, len(constant)))

    def unit(self, eqn: Equation) -> Unit | None:
        return "unsigned"

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        attributes: dict[str, Any] = {"axes": [int(axis) for axis in eqn.params["axes"]]}
        if len(eqn.in_shapes) > 1:
            attributes |= {"empty": eqn.params["empty"], **attributes_of(eqn)}
        return attributes

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *masks = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(*(real(x) for x in inputs))
        values, axes = x.real32(), tuple(eqn.params["axes"])
        if not masks:
            return [Pending.of_real(jax.nn.softmax(values, axis=axes), eqn.out_dtypes[0])]
        mask = taking_part(self.attributes(eqn), masks, values.shape)
        y = jax.nn.softmax(jnp.where(mask, values, jnp.full_like(values, FILL)), axis=axes)
        if eqn.params["empty"] == "zero":
            y = jnp.where(mask, y, jnp.zeros_like(y))
        return [Pending.of_real(y, eqn.out_dtypes[0])]

    def prepare(self, given: Preparation) -> Prepared:
        x, y = given.inputs[0], given.output
        assert x.qmin is not None
        assert x.qmax is not None
        method = self._method(given)
        if method != "exact":
            length = x.shape[given.attributes["axes"][-1]]
            return Prepared(_of_runtime(method, x.scale, length, y.scale, y.zero_point), {"method": method})
        folded = fold_sum([Real.of(_STEP)], y.scale, given.affine, greatest_shift(y.qmin, y.qmax))
        table = exponentials(x.scale, x.qmax - x.qmin + 1)
        return Prepared({"table": table, **folded}, {"method": "exact", "rounding": given.target.rounding.value})

    def composed(self, given: Preparation, steps: Steps) -> list[Part] | None:
        unmasked = dataclasses.replace(given, inputs=given.inputs[:1])
        return None if self._method(unmasked) == "exact" else softmax_parts.parts(given)

    def restated(self, given: Preparation) -> Prepared | None:
        return self.prepare(given)

    @staticmethod
    def _method(given: Preparation) -> str:
        x, y, method = given.inputs[0], given.output, given.target.softmax
        axes = given.attributes["axes"]
        length = x.shape[axes[-1]]
        rows = (
            method is not None
            and (method == "onnx" or given.target.unit_grids)
            and len(given.inputs) == 1
            and axes == [len(x.shape) - 1]
            and length is not None
            and 1 <= length < MOST_TERMS
        )
        if rows and method == "gemmlowp" and x.dtype == "int8" and _is_wide(y):
            return _WIDE
        native = (
            rows
            and x.dtype == y.dtype
            and y.dtype in (("int8",) if method == "uint16" else ("int8", "uint8"))
            and y.qmin is not None
            and y.qmax == y.qmin + 255
        )
        if native and method != "onnx" and not traced(y.scale):
            # a graph that was read from a file can have other output parameters
            native = float(np.asarray(y.scale)) == 2.0**-8 and (traced(y.zero_point) or np.all(y.zero_point == y.qmin))
        return str(method) if native else "exact"

    def arithmetic(self, attributes: Attributes) -> str:
        method = attributes["method"]
        if method == "exact":
            return f"table of exponentials, int64 quotient ({attributes['rounding']})"
        return f"softmax of {method}"

    def accumulator(self, site: Site) -> Bounds | None:
        # the sums are int64; a runtime's own method is used only for rows whose sum fits its int32
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return works_along(attributes)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, *masks = inputs
        if attributes["method"] != "exact":
            fields = _FIELDS[attributes["method"]]
            bits = 16 if attributes["method"] == _WIDE else 8
            found = runtimes.softmax(x, fields(*(jnp.asarray(constants[name]) for name in fields._fields)), bits)
            return clamp_codes(found, constants)
        mask = taking_part(attributes, masks, x.shape) if masks else None
        empty = attributes.get("empty", "uniform")
        p = shares(x, jnp.asarray(constants["table"]), tuple(attributes["axes"]), mask, empty)
        return finish_sum([p], constants, attributes)


def _is_wide(y: Operand) -> bool:
    """Whether a result is that of TFLite's kernel with int16, which does not check the scale any further."""
    if y.dtype != "int16" or traced(y.scale, y.zero_point):
        return False
    unit = np.float32(2.0**-16)
    near = abs(np.float32(np.asarray(y.scale).reshape(())) - unit) <= np.float32(0.001) * unit
    return bool(near) and int(np.asarray(y.zero_point).reshape(())) == -(2**15)


def _of_runtime(
    method: str, scale: ArrayLike, length: int | None, y_scale: ArrayLike, y_zero_point: ArrayLike
) -> dict[str, Array]:
    """The constants of a runtime's method; traced scales are sent to the host."""
    fields, given = _FIELDS[method], (scale, y_scale, y_zero_point)

    def prepared(*given: ArrayLike) -> Any:
        scale, y_scale, zero_point = (np.asarray(value).reshape(()) for value in given)
        made = runtimes.prepare(
            "gemmlowp" if method == _WIDE else method,  # pyright: ignore[reportArgumentType]
            np.float32(scale),
            length=length,
            y_scale=np.float32(y_scale),
            y_zero_point=int(zero_point),
        )
        return tuple(np.asarray(c, np.int32) for c in made)

    if not traced(*given):
        made = prepared(*given)
    else:
        # the shapes do not depend on the scales
        shapes = tuple(jax.ShapeDtypeStruct(c.shape, np.int32) for c in prepared(0.1, 0.1, 0))
        made = jax.pure_callback(prepared, shapes, *given, vmap_method="sequential")
    return dict(zip(fields._fields, made, strict=True))
