"""Weights that training does not change, stored as packed codes; each product unpacks them in both directions.

A frozen weight has the codes that its product would compute from the float weight, so the product's result has the same
bits.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.affine import QParams, QSpec, dequantize
from qjax.numerics.block_formats import BlockFormat, decode_blocks, scales_and_minimums
from qjax.numerics.narrow_codes import from_bytes, joined, split, to_bytes
from qjax.numerics.weight_formats import WeightFormat, decode
from qjax.ops.dynamic import WEIGHTS, Dynamic, DynamicProduct, spread
from qjax.ops.formatted import FormattedProduct, Layout
from qjax.ops.indices import wrapped

Move = tuple[str, tuple[int, ...]]
"""("transpose", permutation) or ("reshape", the new shape)."""


def moved(x: jax.Array, moves: Sequence[Move]) -> jax.Array:
    """Apply moves to an array."""
    for kind, value in moves:
        x = x.reshape(value) if kind == "reshape" else jnp.transpose(x, value)
    return x


def moved_back(x: jax.Array, moves: Sequence[Move], shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `moved`. shape: of the array before."""
    shapes = [shape]
    for kind, value in moves:
        shapes.append(value if kind == "reshape" else tuple(shapes[-1][axis] for axis in value))
    for (kind, value), before in zip(reversed(moves), reversed(shapes[:-1]), strict=True):
        x = x.reshape(before) if kind == "reshape" else jnp.transpose(x, [int(axis) for axis in np.argsort(value)])
    return x


@dataclasses.dataclass(frozen=True)
class Use:
    """How a product reads a parameter. Two equal uses have the same codes.

    setting: how the codes are computed. moves: from the parameter to the operand of the product. shape: of that
    operand. kept: its axes that the product does not sum over.
    """

    setting: QSpec | Dynamic | WeightFormat
    moves: tuple[Move, ...]
    shape: tuple[int, ...]
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Everything about a parameter that is stored as codes, except its numbers.

    shape, dtype: of the parameter, without the axes of scans. stack: lengths of the scans around it, from the outside.
    """

    use: Use
    shape: tuple[int, ...]
    dtype: str
    stack: tuple[int, ...] = ()

    @property
    def _code_shape(self) -> tuple[int, ...]:
        if isinstance(self.use.setting, WeightFormat):
            return tuple(jax.eval_shape(self._layout.rows, jax.ShapeDtypeStruct(self.use.shape, jnp.float32)).shape)
        return self.use.shape

    @property
    def _layout(self) -> Layout:
        return Layout(self.use.shape, self.use.kept)

    @property
    def _codes(self) -> tuple[int, int, Any]:
        """The bits of a code in memory, the lowest code, and the dtype of codes."""
        setting = self.use.setting
        setting = (setting.weights or WEIGHTS) if isinstance(setting, Dynamic) else setting
        if isinstance(setting, QSpec):
            return setting.bits, setting.qmin, setting.dtype
        bits, low = setting.code_range
        return bits, low, jnp.int8 if setting.has_integer_codes else jnp.uint8

    @property
    def _format(self) -> WeightFormat | None:
        """The format of the weight, whether its activations have codes or not."""
        setting = self.use.setting.weights if isinstance(self.use.setting, Dynamic) else self.use.setting
        return setting if isinstance(setting, WeightFormat) else None

    def packed(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """What stays in memory of a product's `stored_parts`, or of a quantizer's codes, scales and zero points."""
        bits, low, _ = self._codes
        codes, *rest = parts
        codes = codes.T if self._is_turned else codes
        if self._blocks is not None:  # nothing is lost: floats are on the grid of float16
            rest = [part.astype(jnp.float16) if part.dtype == jnp.float32 else part for part in rest]
        return [to_bytes(codes.astype(jnp.int32) - low, bits), *rest]

    def stored(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The inverse of `packed`; for one iteration."""
        bits, low, dtype = self._codes
        shape = self._code_shape
        codes = from_bytes(packed[0], bits, shape[::-1] if self._is_turned else shape).astype(jnp.int32) + low
        codes = codes.T if self._is_turned else codes
        return [codes.astype(dtype), *(_widened(part) for part in packed[1:])]

    def unpacked(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The product's `weight_parts` without sums, or a quantizer's codes, scales and zero points."""
        codes, *rest = self.stored(packed)
        if self._blocks is None:
            return [codes, *rest]
        summed = [axis for axis in range(len(self.use.shape)) if axis not in self.use.kept]
        axis = summed[0] if isinstance(self.use.setting, Dynamic) else -1
        return [codes, *scales_and_minimums(rest, self._blocks, axis)]

    @property
    def _blocks(self) -> BlockFormat | None:
        return self._format and self._format.blocks

    def operand(self, packed: Sequence[jax.Array]) -> jax.Array:
        """The weight as its product reads it, float32; for one iteration."""
        codes, *rest = self.unpacked(packed)
        setting = self.use.setting
        if isinstance(setting, WeightFormat):
            return self._layout.back(decode((codes, *rest), setting))
        if isinstance(setting, QSpec):
            return dequantize(codes, QParams(rest[0], rest[1], setting))
        return decode_blocks(codes, *(spread(part, codes.shape) for part in rest))

    def __call__(self, *packed: jax.Array) -> list[jax.Array]:
        """The parameter in its own shape and dtype, with the axes of scans in front."""
        thaw = lambda *packed: moved_back(self.operand(packed), self.use.moves, self.shape).astype(self.dtype)  # noqa: E731
        for _ in self.stack:
            thaw = jax.vmap(thaw)
        return [thaw(*packed)]

    @property
    def has_rows(self) -> bool:
        """Whether it is a table (rows, columns) of which single rows can be unpacked: blocks run along its rows."""
        straight = len(self.shape) == 2 and (self.use.moves, self.use.kept) == ((), (0,))
        turned = (self.use.moves, self.use.kept) == ((("transpose", (1, 0)),), (1,))
        return self._blocks is not None and not self.stack and (straight or turned)

    @property
    def _is_turned(self) -> bool:
        """Whether a product reads a table transposed. Its codes are stored row by row nevertheless, for lookups."""
        return self._row_axis == 1 and self.has_rows

    @property
    def _row_axis(self) -> int:
        """The axis of the product's scales along which the rows of a table run."""
        return self.use.kept[0] if isinstance(self.use.setting, Dynamic) else 0

    def rows(self, packed: Sequence[jax.Array], indices: jax.Array) -> jax.Array:
        """Some rows of the parameter, (*indices, columns), in its dtype; see `has_rows`. indices: within the table."""
        bits, low, _ = self._codes
        axis, (count, columns) = self._row_axis, self.shape

        def some(stored: jax.Array, axis: int) -> jax.Array:
            return jnp.moveaxis(jnp.take(stored, indices.reshape(-1), axis=axis, mode="clip"), axis, 0)

        own = split(packed[0], bits, count * columns)
        chosen = [some(part.reshape(count, -1), 0).reshape(-1) for part in own]
        codes = joined(chosen, bits, (indices.size, columns)).astype(jnp.int32) + low
        assert self._blocks is not None
        parts = scales_and_minimums([_widened(some(part, axis)) for part in packed[1:]], self._blocks)
        value = decode_blocks(codes, *(spread(part, codes.shape) for part in parts))
        return value.astype(self.dtype).reshape(*indices.shape, columns)

    def of_iteration(self) -> "Frozen":
        """The same within the outermost scan."""
        return dataclasses.replace(self, stack=self.stack[1:])


def _widened(part: jax.Array) -> jax.Array:
    return part.astype(jnp.float32) if part.dtype == jnp.float16 else part


@dataclasses.dataclass(frozen=True)
class FrozenLookup:
    """A lookup of rows in a frozen table, which unpacks only these rows.

    wraps, fills: what negative indices and those out of range mean, see `ops.indices`.
    """

    frozen: Frozen
    wraps: bool
    fills: bool

    def __call__(self, indices: jax.Array, *packed: jax.Array) -> list[jax.Array]:
        """The rows that the table of floats would give."""
        size = self.frozen.shape[0]
        places = wrapped({"wraps": self.wraps}, indices, size).astype(jnp.int32)
        rows = self.frozen.rows(packed, jnp.clip(places, np.int32(0), np.int32(size - 1)))
        if not self.fills:
            return [rows]
        inside = (places >= np.int32(0)) & (places < np.int32(size))
        return [jnp.where(jnp.broadcast_to(inside[..., None], rows.shape), rows, jnp.full_like(rows, np.nan))]


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenProduct:
    """A product with a frozen weight. kept: how many arrays store the weight in memory."""

    product: DynamicProduct | FormattedProduct
    frozen: Frozen
    kept: int

    def parts(self, *packed: jax.Array) -> list[jax.Array]:
        """What the product makes of a float weight, computed from the stored arrays."""
        found = self.frozen.unpacked(packed)
        return [*found, self.product.sums(found[0])] if isinstance(self.product, DynamicProduct) else found

    def __call__(self, x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        """arrays: those in memory, then the codes of x if the product has any, then `parts`.

        The gradient reads only those in memory, so nothing that is unpacked has to be stored for the backward.
        """
        return [_product(self, x, *arrays)]

    def value(self, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        """The product, from all arguments of `__call__`."""
        coded = arrays[self.kept :]
        if isinstance(self.product, DynamicProduct):
            return self.product.value(*coded)
        return self.product.multiplied(x, self.product.dequantized(*coded))[0]

    def along_x(self, dx: jax.Array, *packed: jax.Array) -> jax.Array:
        """The product of dx and the dequantized weight."""
        parts = self.frozen.unpacked(packed)
        if isinstance(self.product, DynamicProduct):
            return self.product.along_x(dx, *parts)
        return self.product.multiplied(dx, self.product.dequantized(*parts))[0]


def _value(product: FrozenProduct, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    return product.value(x, *arrays)


_product = jax.custom_jvp(_value, nondiff_argnums=(0,))


@_product.defjvp
def _(product: FrozenProduct, primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    _, *arrays = primals
    along = jax.checkpoint(product.along_x)
    return product.value(*primals), along(tangents[0], *arrays[: product.kept])
