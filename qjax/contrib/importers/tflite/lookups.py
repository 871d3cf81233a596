"""GATHER and EMBEDDING_LOOKUP: rows of a table, or slices of a computed tensor."""

import numpy as np

from qjax.contrib.importers.tflite.values import NUMBERS, Codes, axis_of, bad, grid_of
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.support.errors import Unsupported


@reads("GATHER", "EMBEDDING_LOOKUP")
def rows(walk: Walk, operator: Operator) -> None:
    """Rows of a constant table, by indices that are data."""
    table, indices = (0, 1) if operator.name == "GATHER" else (1, 0)
    if operator.name == "GATHER" and operator.options["batch_dims"]:
        raise Unsupported("it gathers different rows for every example", "Gather along one axis for all of them")
    if operator.name == "GATHER" and walk.numbers_of(operator, 0) is not None:
        raise Unsupported("it gathers whole numbers", NUMBERS)
    held, index = walk.operand(operator, table), walk.operand(operator, indices)
    if held.span is None or index.index not in walk.codes or (operator.name == "GATHER" and operator.options["axis"]):
        _take_slices(walk, operator, table, indices)
        return
    x = walk.codes[index.index]
    if x.grid is not None or not held.shape or not held.size:
        raise bad(operator, f"indices of {x.dtype} in a table of {held.shape}")
    grid = grid_of(held)
    name, own = walk.result(operator, (*x.shape, *held.shape[1:]))
    walk.same_grid(operator, Codes(held.name, held.shape, held.dtype, grid), own)
    walk.node("embed", [x], name, {}, {"kernel": walk.held(operator, table, walk.array(held), grid)})


def _take_slices(walk: Walk, operator: Operator, table: int, indices: int) -> None:
    """Slices of a computed tensor, or slices along another axis."""
    x, index = walk.flowing(operator, table), walk.operand(operator, indices)
    axis = axis_of(operator.options["axis"] if operator.name == "GATHER" else 0, len(x.shape), operator)
    count = x.shape[axis]
    if index.index in walk.codes:
        chosen = walk.flowing(operator, indices)
        if chosen.grid is not None or chosen.dtype != "int32" or not count:
            raise bad(operator, f"indices of {chosen.dtype} in {x.shape}")
    else:
        known = walk.numbers(operator, indices)
        if ((known < 0) | (known >= count)).any():
            raise bad(operator, f"indices out of an axis of {count}")
        name = walk.constant(f"{walk.name_of(operator)}/rows", known.astype(np.int32))
        chosen = Codes(name, known.shape, "int32", None)
    wide = (*chosen.shape, 1)
    name = f"{walk.name_of(operator)}/indices"
    value = walk.tensors[chosen.name].value
    if value is None:
        chosen = walk.reshaped(chosen, wide, name)
    else:
        chosen = Codes(walk.constant(name, np.asarray(value).reshape(wide)), wide, "int32", None)
    shape = [*x.shape[:axis], *wide[:-1], *x.shape[axis + 1 :]]
    walk.bounded(operator, shape)
    attributes = {"axis": axis, "places": list(range(axis, axis + len(wide) - 1))}
    if x.grid is None:
        output = walk.integers(operator, shape, x.dtype, reach=x.reach)
    else:
        output, grid = walk.result(operator, shape)
        walk.same_grid(operator, x, grid)
    walk.node("take", [x, chosen], output, attributes)
