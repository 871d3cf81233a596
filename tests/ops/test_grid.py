"""Operations that move or select codes, on every kind of codes, against numpy and Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.nodes import GRIDS, INT8, INT8_LOW, NARROW, UINT4, UINT8_MIDDLE, UINT16, check, graph_of

SHAPE = (4, 3, 6)
MOVES = {
    # name: (op, attributes, the same in numpy)
    "reshape": ("reshape", {"shape": [None, 9, 2]}, lambda x: x.reshape(4, 9, 2)),
    "transpose": ("transpose", {"permutation": [0, 2, 1]}, lambda x: x.transpose(0, 2, 1)),
    "slice": (
        "slice",
        {"start": [0, 1, 1], "limit": [None, 3, 6], "strides": [1, 1, 2]},
        lambda x: x[:, 1:3, 1:6:2],
    ),
    "slice of the batch": (
        "slice",
        {"start": [0, 0, 0], "limit": [None, 3, 6], "strides": [2, 1, 1]},
        lambda x: x[::2],
    ),
    "first part": ("split", {"sizes": [2, 1, 3], "axis": 2, "index": 0}, lambda x: x[:, :, :2]),
    "last part": ("split", {"sizes": [2, 1, 3], "axis": 2, "index": 2}, lambda x: x[:, :, 3:]),
    "only part": ("split", {"sizes": [6], "axis": 2}, lambda x: x),
    "reverse": ("reverse", {"axes": [0, 2]}, lambda x: x[::-1, :, ::-1]),
    "broadcast": (
        "broadcast",
        {"shape": [None, 2, 3, 6], "dimensions": [0, 2, 3]},
        lambda x: np.broadcast_to(x[:, None], (4, 2, 3, 6)),
    ),
    "cast": ("cast", {}, lambda x: x),
    "max": ("max", {"axes": [1]}, lambda x: x.max(axis=1)),
    "sort": ("sort", {"axis": 1}, lambda x: np.sort(x, axis=1)),
    "sort of the last axis": ("sort", {"axis": 2}, lambda x: np.sort(x, axis=2)),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("grid", [INT8, UINT16])
def test_moves(name, grid):
    op, attributes, oracle = MOVES[name]
    x = grid.codes(np.random.default_rng(len(name)), SHAPE)
    expected = oracle(x)
    graph = graph_of(op, [(SHAPE, grid)], (expected.shape, grid), {}, attributes)
    check(graph, [x], expected.astype(object))


@pytest.mark.parametrize("grid", GRIDS)
def test_pad(grid):
    # leading, trailing and interior padding with real zero; a negative one crops
    x = grid.codes(np.random.default_rng(5), (3, 4, 5))
    attributes = {"padding": [[0, 0, 0], [1, -1, 0], [2, 1, 2]], "lowest": False}
    expected = np.full((3, 4, 16), grid.zero_point, object)
    expected[:, 1:, 2:15:3] = x[:, :3]
    graph = graph_of("pad", [(x.shape, grid)], (expected.shape, grid), {}, attributes)
    check(graph, [x], expected)
    lowest = np.where(expected == grid.zero_point, grid.qmin, expected)
    lowest[:, 1:, 2:15:3] = x[:, :3]
    graph = graph_of("pad", [(x.shape, grid)], (expected.shape, grid), {}, {**attributes, "lowest": True})
    check(graph, [x], lowest)


def test_concatenate():
    rng = np.random.default_rng(6)
    parts = [UINT8_MIDDLE.codes(rng, (3, n, 2)) for n in (1, 4, 2)]
    expected = np.concatenate(parts, axis=1).astype(object)
    inputs = [(part.shape, UINT8_MIDDLE) for part in parts]
    graph = graph_of("concatenate", inputs, (expected.shape, UINT8_MIDDLE), {}, {"axis": 1})
    check(graph, parts, expected)


@pytest.mark.parametrize("grid", [INT8_LOW, UINT4, UINT16, NARROW])
@pytest.mark.parametrize("bounds", [("clamp_min",), ("clamp_max",), ("clamp_min", "clamp_max")])
def test_clamp(grid, bounds):
    span = grid.qmax - grid.qmin
    values = {"clamp_min": grid.qmin + span // 4, "clamp_max": grid.qmax - span // 5}
    constants = {role: np.asarray(values[role], np.int32) for role in bounds}
    x = grid.codes(np.random.default_rng(7), (40,))
    low, high = constants.get("clamp_min", grid.qmin), constants.get("clamp_max", grid.qmax)
    graph = graph_of("clamp", [(x.shape, grid)], (x.shape, grid), constants)
    check(graph, [x], np.clip(x.astype(int), low, high).astype(object))


def test_embed():
    table = NARROW.codes(np.random.default_rng(8), (10, 4))
    indices = np.array([[0, 9, 3], [-1, 10, 2**31 - 1]], np.int32)  # out of range: the nearest row
    expected = table[np.array([[0, 9, 3], [0, 9, 9]])].astype(object)
    graph = graph_of("embed", [(indices.shape, "int32")], ((2, 3, 4), NARROW), {"kernel": table})
    check(graph, [indices], expected)


def test_a_window_of_padding_alone_gives_the_lowest_code():
    attributes = {
        "window": [1, 2],
        "strides": [1, 2],
        "padding": [[0, 0], [2, 0]],
        "base_dilation": [1, 1],
        "window_dilation": [1, 1],
    }
    x = np.array([[5, -3], [-127, -127]], np.int8)
    graph = graph_of("max_pool", [(x.shape, NARROW)], ((2, 2), NARROW), {}, attributes)
    check(graph, [x], np.array([[-127, 5], [-127, -127]], object), distinct=2)


def test_signed_shifts_unsigned_codes():
    from qjax.ops.accumulate import signed, signed_offset

    for dtype in ("uint8", "uint16"):
        codes = np.arange(np.iinfo(dtype).max + 1, dtype=dtype)
        shifted = np.asarray(jax.jit(signed)(jnp.asarray(codes)))
        assert shifted.dtype == np.dtype(dtype[1:])
        assert np.array_equal(shifted.astype(int), codes.astype(int) - signed_offset(dtype))
