"""Translates values (`values.py`) to loops of C.

    for (i = 0; i < 8; ++i) {
        int32_t sum = 0;
        for (k = 0; k < 16; ++k) sum += x[k] * w[16 * i + k];
        y[i] = requantized(sum, multiplier[i]);
    }

One loop nest runs over the elements of a result. Its body reads memory, runs the inner loops of sums, and calls a
function of integers with the arithmetic, such as the requantization. Such a function depends only on its arguments, so
layers with the same rule share it. A sum that is needed at several places is first written to scratch memory, by
another nest.
"""

import dataclasses
from collections.abc import Callable, Sequence

from qjax.export.emit.c import element_reads, inner_loops, threads
from qjax.export.emit.c.blocks import Access, Block, Body, Source
from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.printer import Printer
from qjax.export.emit.c.scalar import COMPARISONS, Expressions, Interval, Scalar, limits
from qjax.export.emit.c.text import STORED, TYPES, identifier, stripped
from qjax.export.emit.c.values import (
    Buffer,
    Chosen,
    Computed,
    Counter,
    Guarded,
    Joined,
    Kept,
    Literal,
    Looped,
    Reduced,
    Register,
    Table,
    Value,
    View,
    has_register,
    inner_turns,
    size,
)
from qjax.support.errors import Unsupported
from qjax.support.names import Names

_INLINE = 60
"""Expressions of at most this many characters are written into the loop itself."""

_DIVISIONS = ("div", "div_wrap", "rem", "rem_wrap")
_LONG = 3
"""With this many operations, what does not change in a loop is computed outside of it; not every compiler does so."""

_RANGES = ((-31, 31), (0, 63), (-128, 127), (0, 255), (-32768, 32767), (0, 65535), (0, 2**31 - 1))
"""The assumed interval of a constant is the first of these that contains it, so that layers share functions."""
_OF_ROLES = {
    "shift": ((-31, -1), (0, 31)),
    "multiplier": ((2**30, 2**31 - 1),),
    "bias": ((-(2**23), 2**23),),
    "acc": ((-(2**23), 2**23),),
}
"""Narrower intervals, for the constants and sums of a requantization; they need int64 only for the product."""


class Layer(Body):
    """A body with its nests of loops; see `Body`."""

    def __init__(self, source: Source, prefix: str, hint: str, note: str = "", reserved: Sequence[str] = ()) -> None:
        super().__init__(source, prefix, hint, note, reserved)
        self._stored: dict[int, Buffer] = {}

    # ------------------------------------------------------------------ nests

    def store(self, target: Buffer, value: Value, *, final: bool = True) -> None:
        """Write a nest of loops that stores a value in memory."""
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
                # an axis of size 1 in the part can be larger in the whole
                return flat(moved, target.shape)

            self._nest(target, part, place, final and len(value.parts) == 1)
            offset += part.shape[value.axis]
        if final:
            self.writes.append(("parts",))

    def _nest(self, target: Buffer, value: Value, place: Callable[[Indices], Index], final: bool) -> None:
        block = outermost = Block(self.root)
        names = _axes(len(value.shape))
        at: list[Index] = []
        for axis, extent in enumerate(value.shape):
            name = block.fresh(names[axis]) if extent > 1 else ""
            at.append(Index.variable(name, extent))
            if extent > 1:
                block = block.within(name, extent)
                if block.parent is outermost:
                    (block.head,) = threads.marked(self.source, [block.head], size(value), inner_turns(value))
        if size(value) == 0:
            return
        text, _ = self.expression(block, value, tuple(at), root=final)
        where = place(tuple(at))
        stored = f"({STORED['bool']})({stripped(text)})" if target.dtype == "bool" else stripped(text)
        block.add(f"{target.name}[{where}] = {stored};")
        if final:
            self.writes.append(where.key)
        self.root.add(*block.nest())

    def stored(self, value: Value) -> Buffer:
        """The value in scratch memory, where it is written once."""
        found = self._stored.get(id(value))
        if found is None:
            found = Buffer(value.shape, value.dtype, self.root.fresh("scratch"))
            self._stored[id(value)] = found
            # `_stored` compares ids, so keep the value alive
            self.kept.append(value)
            self.scratch.append(found)
            self.store(found, value, final=False)
        return found

    # ------------------------------------------------------------------ expressions

    def expression(
        self, block: Block, value: Value, at: Indices, *, conditional: bool = False, root: bool = False
    ) -> tuple[str, Interval]:
        """The element at an index as a C expression, with its interval; its statements are added to the block."""
        made = Expressions()
        leaves: dict[str, tuple[Value, Indices]] = {}
        taken = Names()
        memo: dict[tuple[object, ...], Scalar] = {}

        def scalar(value: Value, at: Indices, *, moved: bool = False) -> Scalar:
            """moved: whether the value is part of what is computed outside of the innermost loop anyway."""
            key = (id(value), moved, *(index.key for index in at))
            found = memo.get(key)
            if found is not None:
                return found
            if isinstance(value, Literal):
                found = made.constant(value.value, value.dtype)
            elif isinstance(value, Computed):
                moves = moved or (not conditional and outside(value, at))
                operands = [scalar(o, _repeated(at, o.shape), moved=moves) for o in value.operands]
                if value.function in COMPARISONS:
                    # insert known numbers, so that a comparison which is always true becomes a constant
                    operands = [known(operand) for operand in operands]
                found = made.apply(value.function, operands, value.dtype)
                if moves and not moved and is_long(found):
                    name = taken.fresh(_leaf_name(value))
                    leaves[name] = (value, at)
                    found = made.parameter(name, value.dtype, (found.low, found.high))
            elif isinstance(value, View):
                found = scalar(value.source, value.where(at), moved=moved)
            else:
                name = taken.fresh(_leaf_name(value))
                leaves[name] = (value, at)
                found = made.parameter(name, value.dtype, _interval(value, at))
            memo[key] = found
            return found

        def outside(value: Value, at: Indices) -> bool:
            return not has_register(value) and block.of(at) not in (None, block)

        def is_long(found: Scalar) -> bool:
            """Whether it takes longer than the other steps of a loop: a division, or arithmetic on a sum."""
            steps = [node.function for node in _all(found) if node.args and node.function != "convert_element_type"]
            sums = any(isinstance(leaves[name][0], Reduced | Looped) for name in _parameters(found))
            divides = any(step in _DIVISIONS for step in steps)
            return divides or (sums and len(steps) >= _LONG)

        def known(operand: Scalar) -> Scalar:
            source = leaves[operand.name][0] if operand.function == "param" else None
            if not isinstance(source, Table) or not source.array.size:
                return operand
            if (source.array != source.array.flat[0]).any():
                return operand
            return made.constant(source.array.flat[0].item(), operand.dtype)

        whole = scalar(value, at)
        used = _parameters(whole)
        interval = whole.low, whole.high
        if whole.function == "param":
            value, at = leaves[whole.name]
            return self.leaf(block, value, at, conditional), interval
        printer = Printer(set())
        text = printer.program(whole)
        if not printer.lines and len(text) <= _INLINE and not any(n.function == "select" for n in _all(whole)):
            arguments = {name: self.leaf(block, *leaves[name], conditional) for name in used}
            inlined = Printer(self.source.helpers)
            return inlined.program(_rename_parameters(whole, arguments), locals_=False), interval
        self.source.helpers |= printer.helpers
        arguments = [stripped(self.leaf(block, *leaves[name], conditional)) for name in used]
        parameters = ", ".join(f"{TYPES[leaves[name][0].dtype]} {name}" for name in used) or "void"
        head = f"static inline {TYPES[value.dtype]} @({parameters})"
        hint, note = (self.hint, self.note) if root else (f"{self.hint}_step", "")
        name = self.source.function(hint, note, head, [*printer.lines, f"return {text};"])
        return f"{name}({', '.join(arguments)})", interval

    def leaf(self, block: Block, value: Value, at: Indices, conditional: bool = False) -> str:
        """An element that is no arithmetic, but read, counted or summed."""
        if isinstance(value, Buffer):
            place = flat(at, value.shape)
            self.accesses.append(Access(value.name, place.key, block.inner or conditional))
            return f"{value.name}[{place}]"
        if isinstance(value, Table):
            return element_reads.constant(self, value, at)
        if isinstance(value, Register):
            if value.place is not None and [i.key for i in value.place] != [i.key for i in at]:
                raise Unsupported("a scan whose steps read their carry at another index has no form in C.")
            return value.name
        if isinstance(value, Counter):
            text = str(at[value.axis])
            text = text if text.isidentifier() else f"({text})"
            return text if value.dtype == "int32" else f"({TYPES[value.dtype]}){text}"
        if isinstance(value, Guarded):
            return element_reads.guarded(self, block, value, at)
        if isinstance(value, Joined):
            return element_reads.joined(self, block, value, at, conditional)
        if isinstance(value, Chosen):
            return element_reads.chosen(self, block, value, at, conditional)
        if isinstance(value, Kept):
            return self.leaf(block, self.stored(value.source), at, conditional)
        if isinstance(value, Reduced | Looped):
            # outside of the loops on which it does not depend
            outer = block.of(at)
            if conditional or outer is None or (block.inner and has_register(value)):
                return self.leaf(block, self.stored(value), at, conditional)
            places = tuple(index.key for index in at)
            key = (id(value), 0, places) if isinstance(value, Reduced) else (id(value.loop), value.position, places)
            found = block.known(key)
            if found is None:
                found = (
                    inner_loops.reduce(self, outer, value, at)
                    if isinstance(value, Reduced)
                    else inner_loops.loop(self, outer, value, at)
                )
                outer.done[key] = found
                self.kept.append(value)
            return found
        if isinstance(value, Computed):
            # hoist an expression that takes longer than the loop's other steps and does not depend on the loop
            outer = block.of(at)
            assert outer is not None
            key = (id(value), 0, tuple(index.key for index in at))
            found = block.known(key)
            if found is None:
                text, _ = self.expression(outer, value, at)
                found = outer.done[key] = outer.fresh(_leaf_name(value))
                outer.add(f"const {TYPES[value.dtype]} {found} = {stripped(text)};")
                self.kept.append(value)
            return found
        raise AssertionError(f"no leaf: {type(value).__name__}")


def _repeated(at: Indices, shape: Sequence[int]) -> Indices:
    """The index at which an operand of an elementwise operation is read: JAX repeats it along axes of size 1."""
    return tuple(index if size > 1 else Index() for index, size in zip(at, shape, strict=True)) if shape else ()


def _axes(rank: int) -> tuple[str, ...]:
    named = {1: ("i",), 2: ("n", "c"), 3: ("n", "t", "c"), 4: ("n", "y", "x", "c")}
    return named.get(rank) or tuple(f"i{axis}" for axis in range(rank))


def _leaf_name(value: Value) -> str:
    if isinstance(value, Table):
        return identifier(value.role)
    if isinstance(value, Reduced):
        return "acc"
    if isinstance(value, Computed):
        return "quotient" if value.function == "div" else "of_sum"
    if isinstance(value, Looped | Register):
        return "carry"
    return "index" if isinstance(value, Counter) else "x"


def _interval(value: Value, at: Indices) -> Interval:
    if isinstance(value, Table) and value.array.size and value.dtype != "float32":
        return _assumed(value, value.role, int(value.array.min()), int(value.array.max()))
    if isinstance(value, Register) and value.reach is not None:
        return _assumed(value, "acc", -value.reach, value.reach)
    if isinstance(value, Counter):
        return at[value.axis].bounds if at[value.axis].terms else limits(value.dtype)
    return limits(value.dtype)


def _assumed(value: Value, role: str, low: int, high: int) -> Interval:
    ranges = (*_OF_ROLES.get(role, ()), *(_RANGES if role != "acc" else ()))
    return next(
        ((a, b) for a, b in ranges if a <= low and high <= b and _within((a, b), value.dtype)), limits(value.dtype)
    )


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
    return [node.name for node in _all(root) if node.function == "param"]


def _rename_parameters(root: Scalar, names: dict[str, str]) -> Scalar:
    """The expression with other texts for its parameters."""
    if root.function == "param":
        text = names[root.name]
        simple = text.isalnum() or text.isidentifier() or text.endswith(("]", ")"))
        return dataclasses.replace(root, name=text if simple else f"({text})")
    return dataclasses.replace(root, args=tuple(_rename_parameters(arg, names) for arg in root.args))
