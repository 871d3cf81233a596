"""Reads floats between codes: CAST or DEQUANTIZE, elementwise steps, QUANTIZE. They become one table of codes.

A float tensor here is a function of at most two tensors of the graph. Nodes are only written when a QUANTIZE reads it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.contrib.importers.tflite.chains import MOST_ENTRIES, OPERATORS, Chain, Operand, Source, Step
from qjax.contrib.importers.tflite.values import CODES, FLOATS, WHOLE_NUMBERS, Codes, bad, kind_of
from qjax.contrib.importers.tflite.walk import Walk, reads, reads_pieces
from qjax.export.tflite_schema.model import FileTensor, Operator
from qjax.support.errors import Unsupported

_OUTSIDE = "Read the part before it, and compute it outside"


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Floats as steps on the real values of codes; values are numbered as in `Chain`."""

    inputs: tuple[Codes, ...]
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of the value that it represents."""
        return len(self.inputs) + len(self.steps) - 1


@reads("CAST", ignores=("from", "to"))
def cast(walk: Walk, operator: Operator) -> None:
    """Floats from integers without a scale; known whole numbers stay known."""
    stated, known = walk.output(operator), walk.numbers_of(operator, 0)
    if known is not None and stated.dtype in WHOLE_NUMBERS:
        walk.know(operator, known)
        return
    x = walk.flowing(operator, 0)
    if stated.dtype != "float32" or x.grid is not None or x.dtype not in ("uint8", "int32"):
        kind = f"{x.dtype} with a scale" if x.grid is not None else x.dtype
        raise Unsupported(f"it makes {stated.dtype} of {kind}", f"qjax reads casts of plain integers. {_OUTSIDE}")
    low, high = (0, 255) if x.dtype == "uint8" else x.reach
    hold(walk, stated, x, Source(x.dtype, None, low, high))


def hold(walk: Walk, output: FileTensor, x: Codes, source: Source) -> None:
    """Record floats that are the real values of a tensor."""
    walk.pieces[output.index] = Piece((x,), (source,), (), x.shape)


@reads_pieces(*OPERATORS, ignores=("powers_of_two",))
def step(walk: Walk, operator: Operator) -> None:
    """Add one step on floats that come from codes."""
    count = 1 if len(operator.inputs) == 1 else 2
    operands = [_operand(walk, operator, place) for place in range(count)]
    parts = [part for part in operands if isinstance(part, Piece)]
    try:
        shape = np.broadcast_shapes(*(part.shape for part in parts))
    except ValueError:
        raise bad(operator, "shapes of its sides") from None
    inputs, sources = _merged(parts)
    steps: list[Step] = []
    given: list[Operand] = []
    for part in operands:
        if not isinstance(part, Piece):
            given.append(part)
            continue
        places = [next(i for i, y in enumerate(inputs) if y.name == x.name) for x in part.inputs]
        places += [len(inputs) + len(steps) + i for i in range(len(part.steps))]
        steps += [
            dataclasses.replace(s, operands=tuple(places[o] if isinstance(o, int) else o for o in s.operands))
            for s in part.steps
        ]
        given.append(places[part.last])
    if operator.options.get("activation"):
        raise Unsupported("an activation fused into a step on floats", _OUTSIDE)
    steps.append(Step(operator.name, tuple(given)))
    walk.pieces[walk.output(operator).index] = Piece(inputs, sources, tuple(steps), shape)


def _operand(walk: Walk, operator: Operator, place: int) -> Piece | float:
    tensor = walk.operand(operator, place)
    if tensor.index in walk.pieces:
        return walk.pieces[tensor.index]
    if tensor.span is not None and tensor.dtype == "float32" and tensor.size == 1:
        return float(walk.array(tensor).reshape(()))
    what = f"its operand {tensor.name!r} is {kind_of(tensor)} of {list(tensor.shape)}"
    raise Unsupported(f"{what}, beside floats that come from codes", f"Give one number, or codes. {_OUTSIDE}")


def _merged(parts: Sequence[Piece]) -> tuple[tuple[Codes, ...], tuple[Source, ...]]:
    found: dict[str, tuple[Codes, Source]] = {}
    for part in parts:
        for x, source in zip(part.inputs, part.sources, strict=True):
            found.setdefault(x.name, (x, source))
    entries = int(np.prod([source.size for _, source in found.values()], dtype=np.float64))
    if len(found) > 2 or entries > MOST_ENTRIES:
        sizes = " x ".join(str(source.size) for _, source in found.values())
        raise Unsupported(
            f"its floats come from tensors of {sizes} values",
            f"qjax reads floats between codes as a table of at most {MOST_ENTRIES} entries. {_OUTSIDE}",
        )
    return tuple(x for x, _ in found.values()), tuple(source for _, source in found.values())


@reads_pieces("QUANTIZE")
def quantize(walk: Walk, operator: Operator) -> None:
    """The codes of floats that come from codes."""
    piece, stated = walk.pieces[walk.operand(operator, 0).index], walk.output(operator)
    if stated.dtype not in CODES:
        raise Unsupported(f"it makes {stated.dtype} of floats", FLOATS)
    inputs, _ = _merged([piece])
    name, grid = walk.result(operator, piece.shape)
    chain = Chain(piece.sources, piece.steps, stated.dtype, grid)
    walk.functions[name] = chain
    if chain.is_function:
        walk.node("table", inputs, name, {"expression": chain.expression.to_json()})
    elif len(inputs) == 1:
        walk.node("embed", [_from_zero(walk, inputs[0], chain.sources[0], name)], name)
    else:
        ranges = [[source.low, source.high] for source in chain.sources]
        walk.node("pair_table", inputs, name, {"ranges": ranges})


def _from_zero(walk: Walk, x: Codes, source: Source, name: str) -> Codes:
    """The integers as rows of a table, counted from the lowest of them."""
    if not source.low:
        return x
    rows = walk.between(f"{name}/rows", x.shape, x)
    least = Codes(walk.constant(f"{name}/least", np.asarray(source.low, np.int32)), (), "int32", None)
    walk.node("logic", [x, least], rows.name, {"function": "sub"})
    return rows
