"""Single reads: constants, elements under a condition, one of several concatenated parts, selected rows."""

import numpy as np

from qjax.export.emit.c import weights
from qjax.export.emit.c.blocks import Block, Body
from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.text import identifier, literal, stripped
from qjax.export.emit.c.values import Buffer, Chosen, Computed, Guarded, Joined, Literal, Table, Value, View


def constant(body: Body, value: Table, at: Indices) -> str:
    """A number, or an element of a constant array."""
    array = value.array
    if _is_one_number(array):
        return _atom(literal(array.reshape(-1)[0].item(), value.dtype))
    wanted, place = f"{body.prefix}_{identifier(value.role)}", flat(at, value.shape)
    if value.role == "kernel" and weights.fitting(array):
        return weights.store(body.source, wanted, array).at(place)
    return f"{body.source.table(wanted, array)}[{place}]"


def guarded(body: Body, block: Block, value: Guarded, at: Indices) -> str:
    """Text of the form (inside ? element : fill); without the condition if it always holds."""
    tests, inside = _guard(value, at)
    source = value.source if is_plain(value.source) else body.stored(value.source)
    conditional = bool(tests)
    text, _ = body.expression(block, source, tuple(inside), conditional=conditional)
    if not tests:
        return text
    fill, _ = body.expression(block, value.fill, ())
    return f"({' && '.join(tests)} ? {stripped(text)} : {stripped(fill)})"


def joined(body: Body, block: Block, value: Joined, at: Indices, conditional: bool) -> str:
    """The part that contains the index, by a chain of conditions if the index itself does not determine it."""
    text, offset = "", 0
    *parts, last = value.parts
    place = at[value.axis]
    low, high = place.bounds
    for part in value.parts:
        if offset <= low and high < offset + part.shape[value.axis]:
            moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
            return body.atomic(block, part, moved, conditional)
        offset += part.shape[value.axis]
    offset = 0
    if block.inner or not all(is_plain(part) for part in value.parts):
        return body.leaf(block, body.stored(value), at, conditional)
    for part in parts:
        moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
        element, _ = body.expression(block, part, moved, conditional=True)
        offset += part.shape[value.axis]
        text += f"{place} < {offset} ? {stripped(element)} : "
    moved = tuple(i + -offset if axis == value.axis else i for axis, i in enumerate(at))
    element, _ = body.expression(block, last, moved, conditional=True)
    return f"({text}{stripped(element)})"


def chosen(body: Body, block: Block, value: Chosen, at: Indices, conditional: bool) -> str:
    """An element of the row that an index in memory selects."""
    if conditional:
        return body.leaf(block, body.stored(value), at, conditional)
    if isinstance(value.source, Table) and _is_one_number(value.source.array):
        # the same for every row; reading the index would only produce a variable that nothing reads, and a warning
        return constant(body, value.source, (Index(),) * len(value.source.shape))
    leading = len(value.rows.shape)
    text, _ = body.expression(block, value.rows, at[:leading])
    name = block.fresh("row")
    block.add(f"const int32_t {name} = {stripped(text)};")
    row = Index.variable(name, max(value.source.shape[0], 2))
    element, _ = body.expression(block, value.source, (row, *at[leading:]))
    return element


def _guard(value: Guarded, at: Indices) -> tuple[list[str], list[Index]]:
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


def _is_one_number(array: np.ndarray) -> bool:
    return array.size > 0 and bool((array == array.reshape(-1)[0]).all())


def _atom(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def is_plain(value: Value, budget: int = 4) -> bool:
    """Whether an element is one read plus little arithmetic, so that it may be evaluated under a condition."""
    if budget < 0:
        return False
    if isinstance(value, View):
        return is_plain(value.source, budget)
    if isinstance(value, Computed):
        return all(is_plain(operand, budget - len(value.operands)) for operand in value.operands)
    return isinstance(value, Buffer | Table | Literal)
