"""Products of channels-last codes with weights as loops that compilers vectorize: dense layers and convolutions.

A window position outside the image reads a constant row of zero points, so that the inner loop needs no condition and
the bias, which includes the zero point, remains correct.

If an output sums many products, its window is first copied to a local array of 16-bit codes, which all features share.
Each feature is then one long dot product. With vector instructions this takes one instruction per eight products or
more. If an output sums few products (a first layer, a depthwise convolution), the innermost loop runs over the
features, with one accumulator for each.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from qjax.export.emit.c import threads, weights
from qjax.export.emit.c.blocks import Block, loop_head, nested
from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.scalar import limits
from qjax.export.emit.c.text import STORED, stripped
from qjax.export.emit.c.values import Buffer, Register, Value

FEW = 16
"""Up to this many products per output, the innermost loop runs over the features."""

MOST_LOCAL = 4096
"""Bytes of local arrays (accumulators, copies) that a function may have on the stack."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A convolution whose input has its channels last and is not dilated; a dense layer is one without taps.

    x: (batch, *spatial, channels). kernel: codes (features, *window, channels of a group). out_axes: the axes of the
    result that are (batch, *spatial, feature).
    """

    x: Buffer
    kernel: np.ndarray
    zero_point: int
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    groups: int
    out_axes: tuple[int, ...]


def store(layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value]) -> None:
    """Write the nest of loops. epilogue: from the accumulators, a register of the target's shape, to the codes."""
    _Nest(layer, target, window, epilogue).write()


class _Nest:
    def __init__(self, layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value]) -> None:
        self.layer, self.target, self.window, self.epilogue = layer, target, window, epilogue
        self.features, *self.taps, self.per_group = window.kernel.shape
        # features of the same group share what they read
        self.block = Block(layer.root)
        self.heads: list[str] = []
        space = {1: ("x",), 2: ("y", "x"), 3: ("z", "y", "x")}.get(len(self.taps))
        space = space or tuple(f"d{axis}" for axis in range(len(self.taps)))
        sizes = [target.shape[axis] for axis in window.out_axes[:-1]]
        self.outer = [
            _variable(self.block, self.heads, name, size) for name, size in zip(("n", *space), sizes, strict=True)
        ]
        self.tap_names = tuple(f"k{name}" for name in space)
        self.reach = reach(window)
        fits = self.reach < 2**31
        self.kind = "int32_t" if fits else "uint32_t"
        x_type, w_type = window.x.dtype, window.kernel.dtype.name
        greatest = math.prod(max(abs(limit) for limit in limits(dtype)) for dtype in (x_type, w_type))
        self.cast = "int32_t" if fits or greatest < 2**31 else "uint32_t"

    def write(self) -> None:
        count = math.prod(self.taps) * self.per_group
        depthwise = self.window.groups > 1 and self.per_group == 1
        if (depthwise or count <= FEW) and self.features * 4 <= MOST_LOCAL:
            self._by_feature()
        else:
            self._by_product(count)

    # ------------------------------------------------------------------ many products

    def _by_product(self, count: int) -> None:
        """Write patch = the codes under the window, and for each feature a dot product with it."""
        window, block, heads = self.window, self.block, self.heads
        each = self.features // window.groups
        group = _variable(block, heads, "g", window.groups)
        wide = "int16_t" if window.x.dtype != "uint16" else "uint16_t"
        copies = 2 * count <= MOST_LOCAL and each > 1
        bits = weights.bits_of(window.kernel)
        per_byte = 8 // bits if copies and bits in weights.PACKED else 1
        bytes_ = -(-count // per_byte)
        rows = window.kernel.reshape(self.features, count)
        kernel = weights.store(self.layer.source, self._kernel, rows, rows=per_byte > 1)
        lines: list[str] = []
        inner = Block(block, inner=True)
        tap_heads: list[str] = []
        tap = [_variable(inner, tap_heads, name, size) for name, size in zip(self.tap_names, self.taps, strict=True)]
        ic_heads: list[str] = []
        ic = _variable(inner, ic_heads, "ic", self.per_group)
        place = flat((*tap, ic), (*self.taps, self.per_group))
        c_heads: list[str] = []
        c = group * each + _variable(block, c_heads, "c", each)
        if not heads:
            c_heads = self._shared(c_heads)
        acc = block.fresh("acc")
        row, start = self._row(inner, tap, group)
        read = f"{row}[{start + ic}]"
        if copies:
            patch = block.fresh("patch")
            self.layer.local(2 * bytes_ * per_byte)
            lines.append(f"{wide} {patch}[{bytes_ * per_byte}];")
            lines += nested(tap_heads, [*inner.lines, *nested(ic_heads, [f"{patch}[{place}] = {read};"])])
            # pad the array up to whole bytes of weights, whose last codes are 0
            lines += [f"{patch}[{rest}] = 0;" for rest in range(count, bytes_ * per_byte)]
            k_heads: list[str] = []
            k = _variable(block, k_heads, "k", bytes_)
            where = c * bytes_ + k
            if per_byte == 1:
                step = [self._add(acc, self._product(f"{patch}[{k}]", kernel.at(where)))]
            else:
                byte = block.fresh("byte")
                step = [f"const int32_t {byte} = {kernel.name}[{where}];"]
                # add all products of a byte in one statement, which compilers vectorize
                codes = [(f"{patch}[{k + i * bytes_}]", kernel.within(byte, i)) for i in range(per_byte)]
                step.append(self._add(acc, *(self._product(code, weight) for code, weight in codes)))
            summed = nested(k_heads, step)
        else:
            product = self._product(read, kernel.at(c * count + place))
            summed = nested(tap_heads, [*inner.lines, *nested(ic_heads, [self._add(acc, product)])])
        body = [f"{self.kind} {acc} = {self._zero()};", *summed, *self._finish(acc, c)]
        self._done([*lines, *nested(c_heads, body)])

    # ------------------------------------------------------------------ few products

    def _by_feature(self) -> None:
        """Write acc[c] for all features at once."""
        window, block = self.window, self.block
        kernel = np.ascontiguousarray(np.moveaxis(window.kernel, 0, -1))
        stored = weights.store(self.layer.source, self._kernel, kernel)
        inner = Block(block, inner=True)
        tap_heads: list[str] = []
        tap = [_variable(inner, tap_heads, name, size) for name, size in zip(self.tap_names, self.taps, strict=True)]
        ic_heads: list[str] = []
        ic = _variable(inner, ic_heads, "ic", self.per_group)
        c_heads: list[str] = []
        c = _variable(block, c_heads, "c", self.features)
        group = c.floordiv(self.features // window.groups) if window.groups > 1 else Index()
        row, start = self._row(inner, tap, Index())
        acc = block.fresh("acc")
        own = f"{acc}[{c}]"
        self.layer.local(4 * self.features)
        place = flat((*tap, ic, c), kernel.shape)
        code = f"{row}[{start + group * self.per_group + ic}]"
        add = self._add(own, self._product(code, stored.at(place)))
        lines = [f"{self.kind} {acc}[{self.features}];", *nested(c_heads, [f"{own} = {self._zero()};"])]
        lines += nested(tap_heads, [*inner.lines, *nested([*ic_heads, *c_heads], [add])])
        self._done([*lines, *nested(c_heads, self._finish(own, c))])

    # ------------------------------------------------------------------ parts

    @property
    def _kernel(self) -> str:
        return f"{self.layer.prefix}_kernel"

    def _zero(self) -> str:
        return "0" if self.kind == "int32_t" else "0u"

    def _product(self, x: str, w: str) -> str:
        return f"({self.cast}){x} * ({self.cast}){w}"

    def _add(self, acc: str, *products: str) -> str:
        if self.cast != self.kind:
            products = tuple(f"({self.kind})({product})" for product in products)
        return f"{acc} += {' + '.join(products)};"

    def _row(self, block: Block, tap: Sequence[Index], group: Index) -> tuple[str, Index]:
        """The pointer to the channels that one tap reads, and the index of the first of the group's."""
        window, layer = self.window, self.layer
        shape = window.x.shape
        tests, start = inside(window, self.outer, tap)
        first = group * self.per_group
        layer.reads_elsewhere(window.x)
        if not tests:
            return window.x.name, start + first
        values = np.full(shape[-1], window.zero_point, np.dtype(window.x.dtype))
        padding = layer.source.table(f"{layer.prefix}_padding", values)
        name = block.fresh("row")
        there = f"&{window.x.name}[{start}]"
        block.add(f"const {STORED[window.x.dtype]} *const {name} =", f"    {' && '.join(tests)} ? {there} : {padding};")
        return name, first

    def _finish(self, acc: str, c: Index) -> list[str]:
        layer, target = self.layer, self.target
        if self.kind != "int32_t":
            layer.source.helpers.add("to_i32")
            acc = f"to_i32({acc})"
        places = [Index()] * len(target.shape)
        for axis, index in zip(self.window.out_axes, (*self.outer, c), strict=True):
            places[axis] = index
        at: Indices = tuple(places)
        last = Block(self.block)
        total = Register(target.shape, "int32", acc, at, self.reach)
        text, _ = layer.expression(last, self.epilogue(total), at, root=True)
        where = flat(at, target.shape)
        layer.writes.append(where.key)
        return [*last.lines, f"{target.name}[{where}] = {stripped(text)};"]

    def _done(self, lines: list[str]) -> None:
        # declarations without a loop around them get braces
        self.layer.root.add(*nested(self._shared(self.heads) or ["{"], lines))

    def _shared(self, heads: list[str]) -> list[str]:
        """The openings of outermost loops, the first of which threads may share."""
        elements = math.prod(self.target.shape)
        products = elements * self.window.kernel.size // self.features
        return threads.marked(self.layer.source, heads, elements, products)


def _variable(block: Block, heads: list[str], name: str, size: int) -> Index:
    """The index of a loop that is opened in `heads`; over one element there is no loop."""
    if size == 1:
        return Index()
    name = block.fresh(name)
    heads.append(loop_head(name, size))
    return Index.variable(name, size)


def inside(window: Window, outer: Sequence[Index], tap: Sequence[Index]) -> tuple[list[str], Index]:
    """The conditions under which a tap lies inside the input, and the offset of the channels that it then reads."""
    shape = window.x.shape
    places: list[Index] = [outer[0]]
    tests: list[str] = []
    for d, (k, size) in enumerate(zip(tap, shape[1:-1], strict=True)):
        place = outer[1 + d] * window.strides[d] + k * window.dilation[d] + -window.before[d]
        low, high = place.bounds
        tests += [f"{place} >= 0"] if low < 0 else []
        tests += [f"{place} < {size}"] if high >= size else []
        places.append(place)
    return tests, flat((*places, Index()), shape)


def reach(window: Window) -> int:
    """A bound on the magnitude of a sum, and of any part of it, over all inputs."""
    greatest = max(abs(limit) for limit in limits(window.x.dtype))
    sums = np.abs(window.kernel.astype(np.int64)).reshape(window.kernel.shape[0], -1).sum(axis=1)
    return int(sums.max(initial=0)) * greatest
