"""Loops inside the body of a loop nest: sums, maxima, scans."""

import math
from collections.abc import Sequence

from qjax.export.emit.c.blocks import Block, Body, loop_head, nested
from qjax.export.emit.c.index import Index, Indices
from qjax.export.emit.c.scalar import limits
from qjax.export.emit.c.text import TYPES, literal, stripped
from qjax.export.emit.c.values import Computed, Guarded, Joined, Loop, Looped, Reduced, Value, View, reached

_UNROLLED = 32
"""Scans of at most this many iterations over joined parts (the windows of an average pool) are unrolled."""


def reduce(body: Body, block: Block, value: Reduced, at: Indices) -> str:
    """Write the loops of a sum or an extreme into the block; returns the text of the result."""
    inner = Block(block, inner=True)
    names = value.names or _inner_names(len(value.extra))
    extra: list[Index] = []
    heads: list[str] = []
    for name, extent in zip(names, value.extra, strict=True):
        name = inner.fresh(name) if extent > 1 else ""
        extra.append(Index.variable(name, extent))
        if extent > 1:
            heads.append(loop_head(name, extent))
    total = block.fresh("acc" if value.function == "add" else "best")
    if 0 in value.extra:
        block.add(f"const {TYPES[value.dtype]} {total} = {literal(value.initial, value.dtype)};")
        return total
    text, (low, high) = body.expression(inner, value.body, (*at, *extra))
    count = math.prod(value.extra)
    least, most = limits(value.dtype)
    wraps = value.function == "add" and not (least <= count * low and count * high <= most)
    kind = TYPES["u" + value.dtype] if wraps and not value.dtype.startswith("u") else TYPES[value.dtype]
    block.add(f"{kind} {total} = {_cast(kind, literal(value.initial, value.dtype))};")
    inner.names.add("element")
    inner.add(*_step(value.function, total, kind, wraps, stripped(text), body.source.helpers, value.dtype))
    block.add(*nested(heads, inner.lines))
    if wraps and kind != TYPES[value.dtype]:
        body.source.helpers.add(f"to_i{value.dtype[3:]}")
        return f"to_i{value.dtype[3:]}({total})"
    return total


def loop(body: Body, block: Block, value: Looped, at: Indices) -> str:
    """Write the loop of a scan into the block; returns the name of the requested carry."""
    scan = value.loop
    names: list[str] = []
    for carry, initial in zip(scan.carries, scan.initial, strict=True):
        text, _ = body.expression(block, initial, at)
        name = block.fresh("carry")
        block.add(f"{TYPES[carry.dtype]} {name} = {stripped(text)};")
        names.append(name)
    for carry, name in zip(scan.carries, names, strict=True):
        carry.name, carry.place = name, at
    if 1 < scan.length <= _UNROLLED and any(_has_parts(step) for step in scan.step):
        for number in range(scan.length):
            written = _turn(body, Block(block), scan, Index(constant=number), names, at)
            block.add("{", *(f"    {line}" for line in written.lines), "}")
    else:
        inner = Block(block, inner=True)
        turn = inner.fresh("turn")
        _turn(body, inner, scan, Index.variable(turn, scan.length), names, at)
        block.add(*nested([loop_head(turn, scan.length)] if scan.length > 1 else [], inner.lines))
    places = tuple(index.key for index in at)
    for position, name in enumerate(names):
        block.done[id(scan), position, places] = name
    return names[value.position]


def _turn(body: Body, inner: Block, scan: Loop, turn: Index, names: list[str], at: Indices) -> Block:
    """One iteration of a loop: the carries' new values, then the assignments."""
    scan.counter.place = (turn * -1 + (scan.length - 1) if scan.reverse else turn,)
    results: list[str] = []
    for carry, step in zip(scan.carries, scan.step, strict=True):
        text, _ = body.expression(inner, step, at)
        if len(scan.step) > 1:
            name = inner.fresh("next")
            inner.add(f"const {TYPES[carry.dtype]} {name} = {stripped(text)};")
            text = name
        results.append(text)
    inner.add(*(f"{name} = {stripped(text)};" for name, text in zip(names, results, strict=True)))
    return inner


def _has_parts(value: Value) -> bool:
    """Whether an element comes from one of several parts, which the iteration's number selects."""

    def inside(item: Value) -> Sequence[Value]:
        if isinstance(item, Computed):
            return item.operands
        return [item.source] if isinstance(item, View | Guarded) else []

    return any(isinstance(item, Joined) for item in reached(value, inside))


def _cast(kind: str, text: str) -> str:
    return text + "u" if kind.startswith("uint") and text.isdigit() else text


def _step(function: str, total: str, kind: str, wraps: bool, text: str, helpers: set[str], dtype: str) -> list[str]:
    if function == "add" and wraps:
        return [f"{total} += ({kind})({text});"]
    if function == "add" and dtype in ("int32", "int64"):
        return [f"{total} += {text};"]
    if dtype == "float32":
        helpers |= {"floats", f"{function}_f32"}
        return [f"{total} = {function}_f32({total}, {text});"]
    if function in ("max", "min"):
        sign = ">" if function == "max" else "<"
        return [f"const {kind} element = {text};", f"{total} = element {sign} {total} ? element : {total};"]
    sign = {"and": "&", "or": "|", "add": "+"}[function]
    return [f"{total} = ({kind})({total} {sign} ({text}));"]


def _inner_names(count: int) -> tuple[str, ...]:
    return ("k",) if count == 1 else tuple(f"k{i}" for i in range(count))
