"""From values (`values.py`) to loops of C.

One nest of loops runs over the elements of a result. Its body reads memory, runs the inner loops of sums, and calls
one function of integers that holds the arithmetic (the requantization, say). Such a function depends on its arguments
alone, so layers under the same rule share it. What a body cannot compute in passing (a sum that is needed at several
places) is written to scratch memory by a nest before it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.scalar import Expressions, Interval, Printer, Scalar, limits, stripped
from qjax.export.emit.c.text import TYPES, Names, comment, identifier, literal, table
from qjax.export.emit.c.values import (
    Buffer,
    Chosen,
    Computed,
    Counter,
    Guarded,
    Joined,
    Literal,
    Loop,
    Looped,
    Reduced,
    Register,
    Table,
    UnsupportedError,
    Value,
    View,
    size,
)

_INLINE = 60
"""Expressions of at most this many characters stand in the loop itself."""

_UNROLLED = 32
"""Scans of at most this many turns over joined parts (the windows of an average pool) are written out."""

_RANGES = ((-31, 31), (0, 63), (-128, 127), (0, 255), (-32768, 32767), (0, 65535), (0, 2**31 - 1))
"""What is assumed of constants: the first of these intervals that holds them, so that layers share functions."""


@dataclasses.dataclass
class Source:
    """What the functions of one file share: functions of integers, tables, helpers."""

    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Text with a placeholder for the name -> name."""
    texts: list[str] = dataclasses.field(default_factory=list)
    tables: dict[tuple[object, ...], str] = dataclasses.field(default_factory=dict)
    table_texts: list[str] = dataclasses.field(default_factory=list)
    table_bytes: int = 0
    helpers: set[str] = dataclasses.field(default_factory=set)
    names: Names = dataclasses.field(default_factory=Names)

    def function(self, wanted: str, note: str, head: str, body: list[str]) -> str:
        """The name of a function of integers; the same text is written once."""
        text = "\n".join([head, "{", *(f"    {line}" for line in body), "}"])
        if text not in self.functions:
            name = self.functions[text] = self.names.fresh(wanted)
            self.texts.append("\n".join([*(comment(note) if note else []), text.replace("@", name)]))
        return self.functions[text]

    def table(self, wanted: str, array: np.ndarray) -> str:
        """The name of a constant array; the same data is stored once."""
        key = (array.dtype.name, array.tobytes())
        if key not in self.tables:
            name = self.tables[key] = self.names.fresh(wanted)
            self.table_texts.append("\n".join(table(name, array)))
            self.table_bytes += max(array.nbytes, array.itemsize)
        return self.tables[key]


class Block:
    """A stretch of C within braces."""

    def __init__(self, parent: "Block | None" = None, *, inner: bool = False) -> None:
        self.parent = parent
        self.inner = inner or (parent is not None and parent.inner)
        self.lines: list[str] = []
        self.taken: set[str] = set()
        self.done: dict[tuple[object, ...], str] = {}

    def fresh(self, wanted: str) -> str:
        """A name that this block and those around it do not use."""
        name, count = wanted, 1
        while self._has(name):
            count += 1
            name = f"{wanted}{count}"
        self.taken.add(name)
        return name

    def _has(self, name: str) -> bool:
        return name in self.taken or (self.parent is not None and self.parent._has(name))

    def known(self, key: tuple[object, ...]) -> str | None:
        """What was computed under this key where it can be seen from here."""
        if key in self.done:
            return self.done[key]
        return None if self.parent is None else self.parent.known(key)

    def add(self, *lines: str) -> None:
        self.lines += lines


@dataclasses.dataclass(frozen=True)
class Access:
    """One reading of memory: which buffer, where, and whether inside of an inner loop or under a condition."""

    buffer: str
    place: tuple[object, ...]
    inner: bool


class Layer:
    """The body of one C function that computes one tensor from others.

    prefix: of its tables. hint: what its function of integers is called; note: the comment on that.
    """

    def __init__(self, source: Source, prefix: str, hint: str, note: str = "", reserved: Sequence[str] = ()) -> None:
        self.source, self.prefix, self.hint, self.note = source, prefix, hint, note
        self.root = Block()
        self.root.taken |= set(reserved)
        self.scratch: list[Buffer] = []
        self.accesses: list[Access] = []
        self.writes: list[tuple[object, ...]] = []
        self.local_bytes = 0
        self._stored: dict[int, Buffer] = {}
        self._kept: list[Value] = []

    # ------------------------------------------------------------------ nests

    def store(self, target: Buffer, value: Value, *, final: bool = True) -> None:
        """A nest that writes a value to memory."""
        if isinstance(value, Joined):
            self._store_parts(target, value, final)
            return
        self._nest(target, value, lambda at: flat(at, target.shape), final)

    def _store_parts(self, target: Buffer, value: Joined, final: bool) -> None:
        offset = 0
        for part in value.parts:
            shift = offset

            def place(at: Indices, shift: int = shift) -> Index:
                moved = tuple(i + shift if axis == value.axis else i for axis, i in enumerate(at))
                # an axis of size 1 in the part may be longer in the whole
                return flat(moved, target.shape)

            self._nest(target, part, place, final and len(value.parts) == 1)
            offset += part.shape[value.axis]
        if final:
            self.writes.append(("parts",))

    def _nest(self, target: Buffer, value: Value, place: Callable[[Indices], Index], final: bool) -> None:
        block = Block(self.root)
        names = _axes(len(value.shape))
        at: list[Index] = []
        heads: list[str] = []
        for axis, extent in enumerate(value.shape):
            name = block.fresh(names[axis]) if extent > 1 else ""
            at.append(Index.variable(name, extent))
            if extent > 1:
                heads.append(loop_head(name, extent))
        if size(value) == 0:
            return
        text, _ = self.expression(block, value, tuple(at), root=final)
        where = place(tuple(at))
        block.add(f"{target.name}[{where}] = {stripped(text)};")
        if final:
            self.writes.append(where.key)
        self.root.add(*nested(heads, block.lines))

    def stored(self, value: Value) -> Buffer:
        """The value in scratch memory, written there once."""
        found = self._stored.get(id(value))
        if found is None:
            found = Buffer(value.shape, value.dtype, self.root.fresh("scratch"))
            self._stored[id(value)] = found
            # ids are compared: the value has to stay alive
            self._kept.append(value)
            self.scratch.append(found)
            self.store(found, value, final=False)
        return found

    def reads_elsewhere(self, buffer: Buffer) -> None:
        """Notes that memory is read, by text that this class did not write."""
        self.accesses.append(Access(buffer.name, (), True))

    def local(self, size: int) -> None:
        """Notes the bytes of a local array."""
        self.local_bytes = max(self.local_bytes, size)

    # ------------------------------------------------------------------ expressions

    def expression(
        self, block: Block, value: Value, at: Indices, *, conditional: bool = False, root: bool = False
    ) -> tuple[str, Interval]:
        """The element at an index as a C expression, its statements in the block; and its interval."""
        made = Expressions()
        leaves: dict[str, tuple[Value, Indices]] = {}
        taken = Names()
        memo: dict[tuple[object, ...], Scalar] = {}

        def scalar(value: Value, at: Indices) -> Scalar:
            key = (id(value), *(index.key for index in at))
            found = memo.get(key)
            if found is not None:
                return found
            if isinstance(value, Literal):
                found = made.constant(value.value, value.dtype)
            elif isinstance(value, Computed):
                operands = [scalar(o, at if o.shape else ()) for o in value.operands]
                found = made.apply(value.op, operands, value.dtype)
            elif isinstance(value, View):
                found = scalar(value.source, value.where(at))
            else:
                name = taken.fresh(_leaf_name(value))
                leaves[name] = (value, at)
                found = made.parameter(name, value.dtype, _interval(value, at))
            memo[key] = found
            return found

        whole = scalar(value, at)
        used = _parameters(whole)
        interval = whole.low, whole.high
        if whole.op == "param":
            value, at = leaves[whole.name]
            return self.leaf(block, value, at, conditional), interval
        printer = Printer(set())
        text = printer.program(whole)
        if not printer.lines and len(text) <= _INLINE and not any(n.op == "select" for n in _all(whole)):
            arguments = {name: self.leaf(block, *leaves[name], conditional) for name in used}
            inlined = Printer(self.source.helpers)
            return inlined.program(_renamed(whole, arguments), locals_=False), interval
        self.source.helpers |= printer.helpers
        arguments = [stripped(self.leaf(block, *leaves[name], conditional)) for name in used]
        parameters = ", ".join(f"{TYPES[leaves[name][0].dtype]} {name}" for name in used) or "void"
        head = f"static inline {TYPES[value.dtype]} @({parameters})"
        hint, note = (self.hint, self.note) if root else (f"{self.hint}_step", "")
        name = self.source.function(hint, note, head, [*printer.lines, f"return {text};"])
        return f"{name}({', '.join(arguments)})", interval

    def leaf(self, block: Block, value: Value, at: Indices, conditional: bool = False) -> str:
        """An element that is no arithmetic: read, counted, summed."""
        if isinstance(value, Buffer):
            place = flat(at, value.shape)
            self.accesses.append(Access(value.name, place.key, block.inner or conditional))
            return f"{value.name}[{place}]"
        if isinstance(value, Table):
            return self._constant(value, at)
        if isinstance(value, Register):
            if value.place is not None and [i.key for i in value.place] != [i.key for i in at]:
                raise UnsupportedError("a scan whose steps read their carry at another place has no form in C.")
            return value.name
        if isinstance(value, Counter):
            text = str(at[value.axis])
            text = text if text.isidentifier() else f"({text})"
            return text if value.dtype == "int32" else f"({TYPES[value.dtype]}){text}"
        if isinstance(value, Guarded):
            return self._guarded(block, value, at)
        if isinstance(value, Joined):
            return self._joined(block, value, at, conditional)
        if isinstance(value, Chosen):
            return self._chosen(block, value, at, conditional)
        if isinstance(value, Reduced | Looped):
            if block.inner or conditional:
                return self.leaf(block, self.stored(value), at, conditional)
            places = tuple(index.key for index in at)
            key = (id(value), 0, places) if isinstance(value, Reduced) else (id(value.loop), value.position, places)
            found = block.known(key)
            if found is None:
                found = self._reduce(block, value, at) if isinstance(value, Reduced) else self._loop(block, value, at)
                block.done[key] = found
                self._kept.append(value)
            return found
        raise AssertionError(f"no leaf: {type(value).__name__}")

    def _atomic(self, block: Block, value: Value, at: Indices, conditional: bool = False) -> str:
        text, _ = self.expression(block, value, at, conditional=conditional)
        return text if text.isidentifier() or text.endswith((")", "]")) else f"({text})"

    def _constant(self, value: Table, at: Indices) -> str:
        array = value.array
        flat_values = array.reshape(-1)
        if flat_values.size and (flat_values == flat_values[0]).all():
            return _atom(literal(int(flat_values[0]), value.dtype))
        name = self.source.table(f"{self.prefix}_{identifier(value.role)}", array)
        return f"{name}[{flat(at, value.shape)}]"

    def _guarded(self, block: Block, value: Guarded, at: Indices) -> str:
        """Text of the form (inside ? element : fill); without the condition where it always holds."""
        tests, inside = guard(value, at)
        source = value.source if _is_plain(value.source) else self.stored(value.source)
        conditional = bool(tests)
        text, _ = self.expression(block, source, tuple(inside), conditional=conditional)
        if not tests:
            return text
        fill, _ = self.expression(block, value.fill, ())
        return f"({' && '.join(tests)} ? {stripped(text)} : {stripped(fill)})"

    def _joined(self, block: Block, value: Joined, at: Indices, conditional: bool) -> str:
        text, offset = "", 0
        *parts, last = value.parts
        place = at[value.axis]
        low, high = place.bounds
        for part in value.parts:
            if offset <= low and high < offset + part.shape[value.axis]:
                moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
                return self._atomic(block, part, moved, conditional)
            offset += part.shape[value.axis]
        offset = 0
        if block.inner or not all(_is_plain(part) for part in value.parts):
            return self.leaf(block, self.stored(value), at, conditional)
        for part in parts:
            moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
            element, _ = self.expression(block, part, moved, conditional=True)
            offset += part.shape[value.axis]
            text += f"{place} < {offset} ? {stripped(element)} : "
        moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
        element, _ = self.expression(block, last, moved, conditional=True)
        return f"({text}{stripped(element)})"

    def _chosen(self, block: Block, value: Chosen, at: Indices, conditional: bool) -> str:
        if conditional:
            return self.leaf(block, self.stored(value), at, conditional)
        leading = len(value.rows.shape)
        text, _ = self.expression(block, value.rows, at[:leading])
        name = block.fresh("row")
        block.add(f"const int32_t {name} = {stripped(text)};")
        row = Index.variable(name, max(value.source.shape[0], 2))
        element, _ = self.expression(block, value.source, (row, *at[leading:]))
        return element

    # ------------------------------------------------------------------ inner loops

    def _reduce(self, block: Block, value: Reduced, at: Indices) -> str:
        inner = Block(block, inner=True)
        names = value.names or _inner_names(len(value.extra))
        extra: list[Index] = []
        heads: list[str] = []
        for name, extent in zip(names, value.extra, strict=True):
            name = inner.fresh(name) if extent > 1 else ""
            extra.append(Index.variable(name, extent))
            if extent > 1:
                heads.append(loop_head(name, extent))
        total = block.fresh("acc" if value.op == "add" else "best")
        if 0 in value.extra:
            block.add(f"const {TYPES[value.dtype]} {total} = {literal(value.initial, value.dtype)};")
            return total
        text, (low, high) = self.expression(inner, value.body, (*at, *extra))
        count = math.prod(value.extra)
        least, most = limits(value.dtype)
        wraps = value.op == "add" and not (least <= count * low and count * high <= most)
        kind = TYPES["u" + value.dtype] if wraps and not value.dtype.startswith("u") else TYPES[value.dtype]
        block.add(f"{kind} {total} = {_cast(kind, literal(value.initial, value.dtype))};")
        inner.taken.add("element")
        inner.add(*_step(value.op, total, kind, wraps, stripped(text), self.source.helpers, value.dtype))
        block.add(*nested(heads, inner.lines))
        if wraps and kind != TYPES[value.dtype]:
            self.source.helpers.add(f"to_i{value.dtype[3:]}")
            return f"to_i{value.dtype[3:]}({total})"
        return total

    def _loop(self, block: Block, value: Looped, at: Indices) -> str:
        loop = value.loop
        names: list[str] = []
        for carry, initial in zip(loop.carries, loop.initial, strict=True):
            text, _ = self.expression(block, initial, at)
            name = block.fresh("carry")
            block.add(f"{TYPES[carry.dtype]} {name} = {stripped(text)};")
            names.append(name)
        for carry, name in zip(loop.carries, names, strict=True):
            carry.name, carry.place = name, at
        if 1 < loop.length <= _UNROLLED and any(_has_parts(step) for step in loop.step):
            for turn in range(loop.length):
                body = self._turn(Block(block), loop, Index(constant=turn), names, at)
                block.add("{", *(f"    {line}" for line in body.lines), "}")
        else:
            inner = Block(block, inner=True)
            turn = inner.fresh("turn")
            self._turn(inner, loop, Index.variable(turn, loop.length), names, at)
            block.add(*nested([loop_head(turn, loop.length)] if loop.length > 1 else ["{"], inner.lines))
        places = tuple(index.key for index in at)
        for position, name in enumerate(names):
            block.done[id(loop), position, places] = name
        return names[value.position]

    def _turn(self, inner: Block, loop: Loop, turn: Index, names: list[str], at: Indices) -> Block:
        """One turn of a loop: the carries' new values, then the assignments."""
        loop.counter.place = (turn * -1 + (loop.length - 1) if loop.reverse else turn,)
        results: list[str] = []
        for carry, step in zip(loop.carries, loop.step, strict=True):
            text, _ = self.expression(inner, step, at)
            if len(loop.step) > 1:
                name = inner.fresh("next")
                inner.add(f"const {TYPES[carry.dtype]} {name} = {stripped(text)};")
                text = name
            results.append(text)
        inner.add(*(f"{name} = {stripped(text)};" for name, text in zip(names, results, strict=True)))
        return inner


def _has_parts(value: Value) -> bool:
    """Whether an element comes out of one of several parts, which a turn's number chooses."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Joined):
            return True
        if isinstance(item, Computed):
            pending += item.operands
        elif isinstance(item, View | Guarded):
            pending.append(item.source)
    return False


def guard(value: Guarded, at: Indices) -> tuple[list[str], list[Index]]:
    """The conditions under which an index lies within the source, and the index there."""
    tests: list[str] = []
    inside: list[Index] = []
    for index, extent, step in zip(value.where(at), value.source.shape, value.steps, strict=True):
        low, high = index.bounds
        if low < 0:
            tests.append(f"{index} >= 0")
        if high > (extent - 1) * step:
            tests.append(f"{index} < {(extent - 1) * step + 1}")
        if step > 1:
            tests.append(f"({index}) % {step} == 0")
            index = Index({f"({index}) / {step}": (1, 0, max(extent - 1, 0))})
        inside.append(index)
    return tests, inside


def nested(heads: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Lines within loops."""
    found: list[str] = []
    for depth, head in enumerate(heads):
        found.append("    " * depth + head)
    found += ["    " * len(heads) + line for line in lines]
    found += ["    " * depth + "}" for depth in reversed(range(len(heads)))]
    return found


def loop_head(name: str, extent: int) -> str:
    """The opening of a loop from 0 on."""
    return f"for (int32_t {name} = 0; {name} < {extent}; {name}++) {{"


def _cast(kind: str, text: str) -> str:
    return text + "u" if kind.startswith("uint") and text.isdigit() else text


def _step(op: str, total: str, kind: str, wraps: bool, text: str, helpers: set[str], dtype: str) -> list[str]:
    if op == "add" and wraps:
        return [f"{total} += ({kind})({text});"]
    if op == "add" and dtype in ("int32", "int64"):
        return [f"{total} += {text};"]
    if op in ("max", "min"):
        sign = ">" if op == "max" else "<"
        return [f"const {kind} element = {text};", f"{total} = element {sign} {total} ? element : {total};"]
    sign = {"and": "&", "or": "|", "add": "+"}[op]
    return [f"{total} = ({kind})({total} {sign} ({text}));"]


def _atom(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def _axes(rank: int) -> tuple[str, ...]:
    named = {1: ("i",), 2: ("n", "c"), 3: ("n", "t", "c"), 4: ("n", "y", "x", "c")}
    return named.get(rank) or tuple(f"i{axis}" for axis in range(rank))


def _inner_names(count: int) -> tuple[str, ...]:
    return ("k",) if count == 1 else tuple(f"k{i}" for i in range(count))


def _is_plain(value: Value, budget: int = 4) -> bool:
    """Whether an element is one reading of memory and little arithmetic, so that it may stand under a condition."""
    if budget < 0:
        return False
    if isinstance(value, View):
        return _is_plain(value.source, budget)
    if isinstance(value, Computed):
        return all(_is_plain(operand, budget - len(value.operands)) for operand in value.operands)
    return isinstance(value, Buffer | Table | Literal)


def _leaf_name(value: Value) -> str:
    if isinstance(value, Table):
        return identifier(value.role)
    if isinstance(value, Reduced):
        return "acc"
    if isinstance(value, Looped | Register):
        return "carry"
    return "index" if isinstance(value, Counter) else "x"


def _interval(value: Value, at: Indices) -> Interval:
    if isinstance(value, Table) and value.array.size:
        low, high = int(value.array.min()), int(value.array.max())
        return next(
            ((a, b) for a, b in _RANGES if a <= low and high <= b and _within((a, b), value.dtype)),
            limits(value.dtype),
        )
    if isinstance(value, Counter):
        return at[value.axis].bounds if at[value.axis].terms else limits(value.dtype)
    return limits(value.dtype)


def _within(interval: Interval, dtype: str) -> bool:
    least, most = limits(dtype)
    return least <= interval[0] and interval[1] <= most


def _all(root: Scalar) -> list[Scalar]:
    seen: dict[int, Scalar] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            pending += reversed(node.args)
    return list(seen.values())


def _parameters(root: Scalar) -> list[str]:
    """The names of the parameters that an expression needs, in the order in which it reads them."""
    return [node.name for node in _all(root) if node.op == "param"]


def _renamed(root: Scalar, names: dict[str, str]) -> Scalar:
    """The expression with other texts for its parameters."""
    if root.op == "param":
        text = names[root.name]
        simple = text.isalnum() or text.isidentifier() or text.endswith(("]", ")"))
        return dataclasses.replace(root, name=text if simple else f"({text})")
    return dataclasses.replace(root, args=tuple(_renamed(arg, names) for arg in root.args))


__all__ = ["Access", "Block", "Layer", "Source", "loop_head", "nested"]
