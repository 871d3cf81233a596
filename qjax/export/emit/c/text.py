"""Pieces of C99 text: identifiers, literals, comments, arrays. All text from a graph passes through here.

Names of tensors, rules and files are not trusted. An identifier keeps only letters and digits, and a comment
can neither end early nor continue on the next line.
"""

import re
import textwrap
from typing import Any

import numpy as np

TYPES = {
    "bool": "int",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int16": "int16_t",
    "uint16": "uint16_t",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "float32": "float",
}

STORED = {**TYPES, "bool": "uint8_t"}
"""The types of arrays in memory: a boolean takes a byte, 0 or 1."""

_KEYWORDS = frozenset(
    [
        *("auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern"),
        *("float", "for", "goto", "if", "inline", "int", "long", "main", "register", "restrict", "return", "short"),
        *("signed", "sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile"),
        "while",
    ]
)

WIDTH = 120


def identifier(text: str) -> str:
    """Letters, digits and single underscores; never a keyword, a reserved name or empty."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", text).strip("_") or "t"
    if name[0].isdigit() or name in _KEYWORDS:
        name = "t_" + name
    return name


def literal(value: Any, dtype: str) -> str:
    """A constant expression: an integer of at least the width of `dtype`, or exactly that float."""
    if dtype == "float32":
        text = f"{float(value).hex()}f" if np.isfinite(value) else "INFINITY" if value > 0 else "-INFINITY"
        return f"({text})" if text.startswith("-") else text
    if dtype == "bool":
        return str(int(value))
    if dtype in ("uint32", "uint64"):
        return f"{value}u" if value < 2**15 and dtype == "uint32" else f"UINT{dtype[4:]}_C({value})"
    if value == -(2**31):
        return "INT32_MIN"
    if value == -(2**63):
        return "INT64_MIN"
    if abs(value) < 2**15:
        return str(value)
    return f"INT{64 if abs(value) >= 2**31 else 32}_C({value})"


def comment(text: str, indent: str = "") -> list[str]:
    """A block comment of whole lines, wrapped; paragraphs of the text remain separate."""
    safe = text.replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?").replace("\\", "/")
    safe = "".join(c if c == "\n" or 32 <= ord(c) < 127 else "?" for c in safe)
    lines: list[str] = []
    for line in safe.strip().split("\n"):
        width = WIDTH - len(indent) - 3
        lines += textwrap.wrap(line, width, break_on_hyphens=False, subsequent_indent="") or [""]
    if len(lines) == 1:
        return [f"{indent}/* {lines[0]} */"]
    first, *rest = lines
    return [f"{indent}/* {first}", *(f"{indent} * {line}".rstrip() for line in rest[:-1]), f"{indent} * {rest[-1]} */"]


def table(name: str, values: Any, *, static: bool = True) -> list[str]:
    """A constant array; multi-dimensional arrays are stored flat, row by row."""
    array = np.asarray(values)
    dtype = array.dtype.name
    items = [literal(v, dtype) for v in array.reshape(-1).tolist()]
    body = _fill_lines(items, WIDTH - 4)
    head = f"{'static ' if static else ''}const {STORED[dtype]} {name}[{max(len(items), 1)}] = {{"
    return [head, *(f"    {line}" for line in body or ["0"]), "};"]


def _fill_lines(items: list[str], width: int) -> list[str]:
    """The items separated by commas, as many per line as fit; textwrap takes minutes for millions."""
    lines, first, used = list[str](), 0, 0
    for index, item in enumerate(items):
        # the comma after an item belongs to its line
        needed = len(item) + (index + 1 < len(items))
        if index > first and used + 1 + needed > width:
            lines.append(", ".join(items[first:index]) + ",")
            first, used = index, needed
        else:
            used += needed + (index > first)
    return [*lines, ", ".join(items[first:])] if items else []


def stripped(text: str) -> str:
    """The expression without the parentheses around the whole of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text
