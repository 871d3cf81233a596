"""C code under construction: what a file's functions share, the lines and names of a block, the body of a layer.

`Body` is the common interface of the writers of expressions (`loops.py`), of single reads (`element_reads.py`) and of
inner loops (`inner_loops.py`).
"""

import abc
import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.c.index import Indices
from qjax.export.emit.c.scalar import Interval
from qjax.export.emit.c.text import comment, table
from qjax.export.emit.c.values import Buffer, Value
from qjax.support.names import Names


@dataclasses.dataclass
class Source:
    """What the functions of one file share: functions of integers, tables, helpers.

    simd: whether products are written for the vectors of x86-64 and AArch64; "cortex_m": for those of a Cortex-M.
    threads: whether loops are marked that several threads may share.
    """

    simd: bool | str = False
    threads: bool = False
    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Text with a placeholder for the name -> name."""
    texts: list[str] = dataclasses.field(default_factory=list)
    tables: dict[tuple[object, ...], str] = dataclasses.field(default_factory=dict)
    table_texts: list[str] = dataclasses.field(default_factory=list)
    table_bytes: int = 0
    weight_bytes: int = 0
    helpers: set[str] = dataclasses.field(default_factory=set)
    names: Names = dataclasses.field(default_factory=Names)

    def function(self, wanted: str, note: str, head: str, body: list[str]) -> str:
        """The name of a function of integers; equal texts are written once."""
        text = "\n".join([head, "{", *(f"    {line}" for line in body), "}"])
        if text not in self.functions:
            name = self.functions[text] = self.names.fresh(wanted)
            self.texts.append("\n".join([*(comment(note) if note else []), text.replace("@", name)]))
        return self.functions[text]

    def table(self, wanted: str, array: np.ndarray, *, weights: bool = False) -> str:
        """The name of a constant array; equal data is stored once."""
        key = (array.dtype.name, array.tobytes())
        if key not in self.tables:
            name = self.tables[key] = self.names.fresh(wanted)
            self.table_texts.append("\n".join(table(name, array)))
            self.table_bytes += max(array.nbytes, array.itemsize)
            self.weight_bytes += array.nbytes if weights else 0
        return self.tables[key]


class Block:
    """A section of C within braces.

    variable, head: of the loop whose body it is, in a nest of loops over the elements of a result; see `within`.
    """

    def __init__(self, parent: "Block | None" = None, *, inner: bool = False) -> None:
        self.parent = parent
        self.inner = inner or (parent is not None and parent.inner)
        self.lines: list[str] = []
        self.names = Names(between="", beside=parent.names if parent is not None else ())
        self.done: dict[tuple[object, ...], str] = {}
        self.variable = self.head = ""

    def within(self, variable: str, extent: int) -> "Block":
        """The body of a loop inside of this block. The blocks of a nest share their names."""
        body = Block(self)
        body.names = self.names
        body.variable, body.head = variable, loop_head(variable, extent)
        return body

    def of(self, at: Indices) -> "Block | None":
        """The outermost block of the nest in which an index has a value; None if it belongs to an inner loop."""
        used = {name for index in at for term in index.terms for name in re.findall(r"[A-Za-z_]\w*", term)}
        innermost = self
        while innermost.inner and innermost.parent is not None:
            innermost = innermost.parent
        block = innermost
        while block.variable and block.parent is not None and block.variable not in used:
            block = block.parent
        known, outer = set[str](), block
        while outer.variable and outer.parent is not None:
            known.add(outer.variable)
            outer = outer.parent
        if used <= known:
            return block
        # a name that is no variable of the nest is declared in the block itself
        return None if self.inner else self

    def nest(self) -> list[str]:
        """The lines of the whole nest whose innermost block this is."""
        lines, block = self.lines, self
        while block.variable and block.parent is not None:
            lines = [block.head, *(f"    {line}" for line in lines), "}"]
            block = block.parent
            lines = [*block.lines, *lines]
        return nested([], lines) if block is self or block.lines else lines

    def fresh(self, wanted: str) -> str:
        """A name that this block and those around it do not use."""
        return self.names.fresh(wanted)

    def known(self, key: tuple[object, ...]) -> str | None:
        """What was computed under this key, if it is visible here."""
        if key in self.done:
            return self.done[key]
        return None if self.parent is None else self.parent.known(key)

    def add(self, *lines: str) -> None:
        self.lines += lines


@dataclasses.dataclass(frozen=True)
class Access:
    """One read of memory: which buffer, where, and whether it is inside of an inner loop or under a condition."""

    buffer: str
    place: tuple[object, ...]
    inner: bool


class Body(abc.ABC):
    """The body of one C function that computes one tensor from others.

    prefix: of its tables. hint: the name of its function of integers; note: the comment on that function.
    """

    def __init__(self, source: Source, prefix: str, hint: str, note: str = "", reserved: Sequence[str] = ()) -> None:
        self.source, self.prefix, self.hint, self.note = source, prefix, hint, note
        self.root = Block()
        self.root.names.add(*reserved)
        self.scratch: list[Buffer] = []
        self.accesses: list[Access] = []
        self.writes: list[tuple[object, ...]] = []
        self.local_bytes = 0
        self.kept: list[Value] = []

    def reads_elsewhere(self, buffer: Buffer) -> None:
        """Records that memory is read by text that this class did not write."""
        self.accesses.append(Access(buffer.name, (), True))

    def local(self, size: int) -> None:
        """Records the bytes of a local array."""
        self.local_bytes = max(self.local_bytes, size)

    def atomic(self, block: Block, value: Value, at: Indices, conditional: bool = False) -> str:
        """An element as text that can be part of an expression."""
        text, _ = self.expression(block, value, at, conditional=conditional)
        return text if text.isidentifier() or text.endswith((")", "]")) else f"({text})"

    @abc.abstractmethod
    def stored(self, value: Value) -> Buffer:
        """The value in scratch memory, where it is written once."""

    @abc.abstractmethod
    def expression(
        self, block: Block, value: Value, at: Indices, *, conditional: bool = False, root: bool = False
    ) -> tuple[str, Interval]:
        """The element at an index as a C expression, with its interval; its statements are added to the block."""

    @abc.abstractmethod
    def leaf(self, block: Block, value: Value, at: Indices, conditional: bool = False) -> str:
        """An element that is no arithmetic, but read, counted or summed."""


def nested(heads: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Lines within loops. Without a loop, several lines get braces: neighbouring blocks declare the same names."""
    if not heads and len(lines) > 1:
        heads = ["{"]
    found: list[str] = []
    for depth, head in enumerate(heads):
        found.append("    " * depth + head)
    found += ["    " * len(heads) + line for line in lines]
    found += ["    " * depth + "}" for depth in reversed(range(len(heads)))]
    return found


def loop_head(name: str, extent: int) -> str:
    """The opening of a loop that starts at 0."""
    return f"for (int32_t {name} = 0; {name} < {extent}; {name}++) {{"
