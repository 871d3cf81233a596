"""Embedding lookups from a table with one scale per row, or per group of rows or columns.

The rows have different scales, so the result has its own quantizer. Each code is multiplied by the factor of its row
and rounded once (`epilogue.finish_sum`), in integers. A table with one scale is an `embed`, which needs no arithmetic.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.qspec import QSpec, dividing_group
from qjax.numerics.softfloat import Real
from qjax.ops.base import Attributes, Constants, Equation, Preparation, Prepared, Quantized, Role, register
from qjax.ops.embed import Embed
from qjax.ops.epilogue import Affine, finish_sum, fold_sum, greatest_shift
from qjax.ops.fields import Natural, Rounded
from qjax.ops.float_accumulator import Pending
from qjax.ops.indices import Lookup, outside, wrapped


def has_scales_of_rows(spec: QSpec, rows: int) -> bool:
    """Whether a spec asks for scales along the `rows` rows of a table: axis 0, or groups along it.

    axis=-1 does not: it means the output channels of any layer, and a lookup has none.
    """
    axes = () if spec.axis is None else (spec.axis,) if isinstance(spec.axis, int) else spec.axis
    grouped = spec.group_size is not None and not axes and spec.group_axis == 0
    return 0 in axes or (grouped and dividing_group(spec.group_size or 1, rows) is not None)


def check_rows(spec: QSpec, shape: tuple[int, ...], name: str) -> None:
    """Raise an error if a table cannot have the scales for which `has_scales_of_rows` is true."""
    if len(shape) != 2:
        raise ValueError(
            f"Quantizer {name!r}: expected a table of two axes for scales of rows, got shape {shape}. Leave axis out."
        )
    axes = () if spec.axis is None else (spec.axis,) if isinstance(spec.axis, int) else spec.axis
    if any(axis != 0 for axis in axes):
        raise ValueError(
            f"Quantizer {name!r}: expected axis=0 (scales along the table's rows), got axis={spec.axis}. For groups "
            "within a row add group_size=32, group_axis=1."
        )
    try:
        spec.param_axes(len(shape))
    except ValueError as error:
        raise ValueError(f"Quantizer {name!r}: {error}.") from None


class Fields(Lookup):
    """table: rows and columns of the table."""

    table: list[Natural]


@register
class EmbedRows(Embed):
    """y = round(table[indices] * factor[rows of the indices]); an `embed` with several scales becomes this.

    attributes: those of `embed`, and rounding. constants: weights holds the codes [rows, columns], whose axis of the
    groups is stored as two axes. shift and factor0 are int32 [scales along the rows, scales along the columns].
    """

    name = "embed_rows"
    fields = Fields
    prepared = Rounded
    role = Role.PRODUCER
    primitives: ClassVar[tuple[str, ...]] = ()
    indexed = "weights"
    by_row = None
    read_as = "embed"
    scales_rows = True
    takes_steps = False
    keeps: ClassVar[tuple[str, ...]] = ("weights",)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        indices, table, *_ = inputs
        if not isinstance(table, Quantized):
            return eqn.bind(*inputs)
        scale = jnp.broadcast_to(lax.stop_gradient(table.scale), table.codes.shape)
        rows, scales = (eqn.bind(indices, x)[0] for x in (table.codes, scale))
        return [Pending.start(rows, scales, eqn.out_dtypes[0], rounded=False)]

    def prepare(self, given: Preparation) -> Prepared:
        shift = greatest_shift(given.output.qmin, given.output.qmax)
        scale = Real.of(given.constants["weight_scale"])
        folded = fold_sum([scale], given.output.scale, Affine.identity(), shift)
        # no affine step follows the lookup, so there is no offset
        return Prepared({role: folded[role] for role in ("shift", "factor0")}, _rounding(given))

    def restated(self, given: Preparation) -> Prepared:
        return Prepared({role: given.constants[role] for role in ("shift", "factor0")}, _rounding(given))

    def misplaced(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array | None:
        return outside(attributes, inputs[0], attributes["table"][0])

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        rows, columns = attributes["table"]
        table = jnp.asarray(constants["weights"]).reshape(rows, columns)
        indices = wrapped(attributes, inputs[0], rows).astype(jnp.int32)
        indices = jnp.clip(indices, np.int32(0), np.int32(rows - 1))
        own = np.shape(constants["factor0"])
        scaled = lax.div(indices, jnp.full_like(indices, rows // own[0]))

        def along_columns(role: str) -> jax.Array:
            found = jnp.take(jnp.asarray(constants[role]), scaled, axis=0, mode="clip")
            spread = jnp.broadcast_to(found[..., None], (*found.shape, columns // own[1]))
            return spread.reshape(*indices.shape, columns)

        nothing = jnp.zeros((), jnp.int32)
        known = {**constants, "offset_high": nothing, "offset_low": nothing}
        known |= {role: along_columns(role) for role in ("shift", "factor0")}
        codes = jnp.take(table, indices, axis=0, mode="clip").astype(jnp.int32)
        return finish_sum([codes], known, attributes)


def _rounding(given: Preparation) -> dict[str, str]:
    return {"rounding": given.target.rounding.value}
