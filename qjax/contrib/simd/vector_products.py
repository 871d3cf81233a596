"""Products of two activations of 8 bits, sixteen features at a time; see `vectors.h`.

The operand with the last axis of the result is packed into blocks of sixteen features, in the layout of weights. Then
the rows of the other one are read like inputs of a dense layer. With codes x and w and their zero points z:

    sum (x - z_x)(w - z_w) = sum x w - z_x sum w - z_w sum x + n z_x z_w

uint8 codes in blocks become int8, by subtracting 128 from them and their zero point.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.simd.vector_codes import FEATURES, Codes, codes_of, stored
from qjax.export.emit.c import threads
from qjax.export.emit.c.blocks import Block, loop_head, nested
from qjax.export.emit.c.index import Index, flat, strides
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.text import STORED
from qjax.export.emit.c.values import Buffer, Value
from qjax.export.emit.requantizations import finish_of_sum

_QUAD = 4
_WIDE, _NARROW = 8, 4
"""Rows that are computed together, by the number of registers."""
_BYTES = ("int8", "uint8")
_MOST_LOCAL = 2**15
"""Bytes of a packed block on the stack, which is large on processors with vectors."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand: its memory, its zero point, and the axes that are summed, shared, and free."""

    codes: Buffer
    zero_point: int
    summed: int
    batch: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def low(self) -> int:
        return int(np.iinfo(self.codes.dtype).min) - self.zero_point

    @property
    def high(self) -> int:
        return int(np.iinfo(self.codes.dtype).max) - self.zero_point

    def step(self, axis: int) -> int:
        """The distance from one code to the next along an axis."""
        return strides(self.codes.shape)[axis]


@dataclasses.dataclass(frozen=True)
class Product:
    """rows, packed: the operands. feature: the axis of the packed one that is innermost in the result.

    places: by side (True: the packed one) and axis, the axis of the result. codes: from sums to codes.
    """

    rows: Side
    packed: Side
    feature: int
    places: Mapping[tuple[bool, int], int]
    codes: Codes


def read(
    attributes: Mapping[str, Any], values: Mapping[str, Any], inputs: Sequence[Value], target: Buffer
) -> Product | None:
    """The product of a node that has a form here, else None.

    values: the constants of the node by role.
    """
    buffers = [x for x in (*inputs, target) if isinstance(x, Buffer) and x.dtype in _BYTES and 0 not in x.shape]
    if len(buffers) < 3:
        return None
    sides: list[Side] = []
    places: list[dict[int, int]] = []
    raw = 0
    for index, side in enumerate(("lhs", "rhs")):
        contracting, batch = (tuple(attributes[f"{side}_{kind}"]) for kind in ("contracting", "batch"))
        if len(contracting) != 1:
            return None
        x, zero_point = buffers[index], int(np.asarray(values[f"zero_point{index}"]).reshape(()))
        free = tuple(axis for axis in range(len(x.shape)) if axis not in (*contracting, *batch))
        sides.append(Side(x, zero_point, contracting[0], batch, free))
        raw = len(batch) if index == 0 else raw
        places.append(dict(zip(batch, range(len(batch)), strict=True)) | {a: raw + i for i, a in enumerate(free)})
        raw += len(free)
    order = attributes["permutation"] or list(range(raw))
    back = {axis: place for place, axis in enumerate(order)}
    last = next(place for place in reversed(range(raw)) if target.shape[place] > 1 or place == 0)
    innermost = [(i, axis) for i in (0, 1) for axis in sides[i].free if back[places[i][axis]] == last]
    if not innermost:
        return None
    ((packed, feature),) = innermost
    rows, other = sides[1 - packed], sides[packed]
    depth = rows.codes.shape[rows.summed]
    positions = math.prod(rows.codes.shape[axis] for axis in rows.free)
    if positions < _NARROW or target.shape[last] < _NARROW or FEATURES * (depth + 3) > _MOST_LOCAL:
        return None
    products = [a * b for a in (rows.low, rows.high) for b in (other.low, other.high)]
    held = {role: np.asarray(value) for role, value in values.items() if value is not None}
    finish = finish_of_sum(attributes, held, (depth * min(products), depth * max(products)))
    codes = codes_of(finish, FEATURES, target.dtype)
    if codes is None:
        return None
    found = {(i == packed, axis): back[raw] for i in (0, 1) for axis, raw in places[i].items()}
    return Product(rows, other, feature, found, codes)


def store(layer: Layer, target: Buffer, product: Product) -> None:
    """The nest of loops."""
    layer.source.helpers.add("vectors")
    for side in (product.rows, product.packed):
        layer.reads_elsewhere(side.codes)
    layer.writes.append(("vectors",))
    _Nest(layer, target, product).write()


class _Nest:
    def __init__(self, layer: Layer, target: Buffer, product: Product) -> None:
        self.layer, self.target, self.product = layer, target, product
        self.rows, self.packed = product.rows, product.packed
        self.depth = self.rows.codes.shape[self.rows.summed]
        self.padded = self.depth + -self.depth % _QUAD
        self.feature = product.feature
        self.features = self.packed.codes.shape[self.feature]
        self.sizes = [self.rows.codes.shape[axis] for axis in self.rows.free]
        self.positions = math.prod(self.sizes)
        self.flips = self.packed.codes.dtype == "uint8"
        self.zero_point = self.packed.zero_point - (128 if self.flips else 0)

    def write(self) -> None:
        """Write loops over the axes that both operands share, and over the other free axes of the packed one."""
        block = Block(self.layer.root)
        heads: list[str] = []
        at: dict[int, Index] = {}
        outer = [*self.packed.batch, *(axis for axis in self.packed.free if axis != self.feature)]
        for axis in outer:
            size = self.packed.codes.shape[axis]
            name = block.fresh(f"i{axis}") if size > 1 else ""
            at[axis] = Index.variable(name, size)
            if size > 1:
                heads += [loop_head(name, size)] if heads else self._heads(name, size)
        count = max(1, -(-self.features // FEATURES))
        last = max(0, self.features - FEATURES)
        plain = f"block * {FEATURES}"
        n = plain if (count - 1) * FEATURES == last else f"block < {count - 1} ? {plain} : {last}"
        body = [
            f"const int32_t n = {n if count > 1 else '0'};",
            f"int8_t w[{FEATURES * self.padded}];",
            f"int32_t totals[{FEATURES}], start[{FEATURES}], features[{FEATURES}];",
            *self._pack(at),
            "#if QJAX_SUMS >= 8",
            *self._tiles(at, min(_WIDE, self.positions)),
            "#else",
            *self._tiles(at, min(_NARROW, self.positions)),
            "#endif",
        ]
        self.layer.local(FEATURES * self.padded + 12 * FEATURES + _WIDE * (self.padded + 16))
        if count == 1:
            heads.append("{")
        else:
            overlap = self.features % FEATURES != 0
            heads += [loop_head("block", count)] if heads else self._heads("block", count, overlap=overlap)
        self.layer.root.add(*nested(heads, body))

    def _heads(self, name: str, extent: int, *, overlap: bool = False) -> list[str]:
        """The openings of the outermost loop."""
        elements = math.prod(self.target.shape)
        return threads.shared(self.layer.source, name, extent, elements, elements * self.depth, overlap=overlap)

    # ------------------------------------------------------------------ the packed operand

    def _pack(self, at: Mapping[int, Index]) -> list[str]:
        """Write `w`: sixteen features from n on; `start`: see `vectors.h`; `features`: the terms with z_x."""
        side, width = self.packed, min(FEATURES, self.features)
        base = flat(tuple(at.get(axis, Index()) for axis in range(len(side.codes.shape))), side.codes.shape)
        down, across = side.step(side.summed), side.step(self.feature)
        kind = STORED[side.codes.dtype]
        offset = f"{base} + " if base.terms or base.constant else ""
        lines = [f"const {kind} *const from = {side.codes.name} + {offset}n * {across};"]
        if width < FEATURES or self.padded > self.depth:
            lines.append("memset(w, 0, sizeof w);")
        lines.append("memset(totals, 0, sizeof totals);")
        if down == 1:
            sums = nested([loop_head("k", self.depth)], [f"total += from[j * {across} + k];"])
            less = f" - {128 * self.depth}" if self.flips else ""
            one = [*self._copy_codes(across), "int32_t total = 0;", *sums, f"totals[j] = total{less};"]
            lines += nested([loop_head("j", width)], one)
        else:
            code = f"from[k * {down} + j * {across}]"
            code = f"(int8_t)({code} - 128)" if self.flips else code
            put = [
                f"const int8_t code = {code};",
                f"w[(k & ~3) * {FEATURES} + j * 4 + (k & 3)] = code;",
                "totals[j] += code;",
            ]
            lines += nested([loop_head("k", self.depth), loop_head("j", width)], put)
        sign = 128 if self.rows.codes.dtype == "uint8" else -128
        constant = self.depth * self.rows.zero_point * self.zero_point
        facts = [f"start[j] = {sign} * totals[j];", f"features[j] = {constant} + {-self.rows.zero_point} * totals[j];"]
        return lines + nested([loop_head("j", FEATURES)], facts)

    def _copy_codes(self, across: int) -> list[str]:
        """The codes of feature j, four at a time."""
        rest = self.depth - self.depth % _QUAD
        four = f"w + k * {FEATURES} + j * 4"
        copy = [f"memcpy({four}, from + j * {across} + k, 4);"]
        if self.flips:
            less = [f"const uint8_t *const code = from + j * {across} + k;"]
            copy = less + [f"({four})[{i}] = (int8_t)(code[{i}] - 128);" for i in range(_QUAD)]
        lines = nested([f"for (int32_t k = 0; k < {rest}; k += 4) {{"], copy) if rest else []
        for k in range(rest, self.depth):
            code = f"from[j * {across} + {k}]"
            code = f"(int8_t)({code} - 128)" if self.flips else code
            lines.append(f"w[{rest * FEATURES} + j * 4 + {k - rest}] = {code};")
        return lines

    # ------------------------------------------------------------------ the rows

    def _tiles(self, at: Mapping[int, Index], own: int) -> list[str]:
        """A loop over tiles of that many rows."""
        turns = -(-self.positions // own)
        first = f"tile * {own}"
        if (turns - 1) * own != self.positions - own:
            first = f"tile < {turns - 1} ? {first} : {self.positions - own}"
        suffix = "u8" if self.rows.codes.dtype == "uint8" else "i8"
        kind = STORED[self.rows.codes.dtype]
        body = [
            f"const int32_t first = {first if turns > 1 else '0'};",
            f"const {kind} *rows[{own}];",
            f"int32_t places[{own}];",
        ]
        if self.zero_point:
            body.append(f"int32_t apart[{own}];")
        if self._copies:
            body.append(f"{kind} row[{own}][{self.padded}];")
        body += self._each_row(at, own)
        body += [f"const {kind} *const x{p} = rows[{p}];" for p in range(own)]
        body += [f"sums16 sums{p} = sums16_start_{suffix}(start);" for p in range(own)]
        steps = [f"sums{p} = sums16_add_{suffix}(sums{p}, x{p} + k, w + k * {FEATURES});" for p in range(own)]
        body += nested([f"for (int32_t k = 0; k < {self.padded}; k += {_QUAD}) {{"], steps)
        for p in range(own):
            body += self._write_codes(p)
        return nested([loop_head("tile", turns)] if turns > 1 else ["{"], body)

    @property
    def _copies(self) -> bool:
        """Whether four consecutive codes of a row are not consecutive in memory."""
        return self.rows.step(self.rows.summed) != 1 or self.padded != self.depth

    def _each_row(self, at: Mapping[int, Index], own: int) -> list[str]:
        """Write `rows`, `places` and `apart`: a pointer to a row, one to its results, and the term with z_w."""
        side, places = self.rows, self.product.places
        shared = {a: at[b] for a, b in zip(side.batch, self.packed.batch, strict=True)}
        lines = ["const int32_t m = first + p;"]
        below, found = self.positions, dict(shared)
        for number, (axis, size) in enumerate(zip(side.free, self.sizes, strict=True)):
            below //= max(size, 1)
            if size == 1:
                found[axis] = Index()
                continue
            text = "m" if below == 1 else f"m / {below}"
            if any(other > 1 for other in self.sizes[:number]):
                text = f"({text}) % {size}" if below > 1 else f"{text} % {size}"
            name = f"row{number}"
            lines.append(f"const int32_t {name} = {text};")
            found[axis] = Index.variable(name, size)
        base = flat(tuple(found.get(axis, Index()) for axis in range(len(side.codes.shape))), side.codes.shape)
        result: list[Index] = [Index()] * len(self.target.shape)
        for axis, index in found.items():
            result[places[False, axis]] = index
        for axis, index in at.items():
            result[places[True, axis]] = index
        lines.append(f"places[p] = {flat(tuple(result), self.target.shape)};")
        source, step = f"{side.codes.name} + {base}", side.step(side.summed)
        if self._copies:
            kind = STORED[side.codes.dtype]
            lines.append(f"const {kind} *const from_row = {source};")
            if step == 1:
                lines.append(f"memcpy(row[p], from_row, {self.depth});")
            else:
                lines += nested([loop_head("k", self.depth)], [f"row[p][k] = from_row[k * {step}];"])
            lines += [f"row[p][{k}] = 0;" for k in range(self.depth, self.padded)]
            source = "row[p]"
        lines.append(f"rows[p] = {source};")
        if self.zero_point:
            lines += [
                "int32_t total = 0;",
                *nested([loop_head("k", self.depth)], ["total += rows[p][k];"]),
                f"apart[p] = {-self.zero_point} * total;",
            ]
        return nested([loop_head("p", own)], lines)

    def _write_codes(self, p: int) -> list[str]:
        number = f"numbers16_plus(sums16_numbers(sums{p}), features, {f'apart[{p}]' if self.zero_point else '0'})"

        def vector(role: str, values: np.ndarray) -> str:
            table = np.broadcast_to(values, (FEATURES,)).copy()
            return self.layer.source.table(f"{self.layer.prefix}_{role}", table)

        made = self.product.codes.text(number, vector)
        return stored(made, f"{self.target.name} + places[{p}] + n", self.features, self.target.dtype)


__all__ = ["Product", "read", "store"]
