"""Convolutions of every kind against their definition in Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qjax.ops import accumulate, convolution
from tests.ops.nodes import (
    INT4,
    INT8,
    INT8_HIGH,
    INT8_LOW,
    INT16,
    INT16_ODD,
    NARROW,
    UINT8,
    UINT8_HIGH,
    UINT8_MIDDLE,
    Grid,
    check,
    conv,
    finish_weighted,
    graph_of,
    weighted_constants,
)

WIDE = Grid("int16", -255, 255, 0)
CASES = {
    # name: (x, window, features, strides, padding, lhs dilation, rhs dilation, groups, codes of x and w)
    "same": ((2, 5, 4, 8), (3, 3), 4, (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 1, INT8_LOW, NARROW),
    "many channels": ((1, 4, 3, 40), (2, 2), 3, (1, 2), ((0, 1), (1, 0)), (1, 1), (1, 1), 1, UINT8_MIDDLE, NARROW),
    "few channels": ((2, 6, 5, 3), (3, 2), 4, (2, 2), ((0, 1), (2, 1)), (1, 1), (1, 1), 1, UINT8_HIGH, NARROW),
    "one by one": ((2, 3, 3, 9), (1, 1), 5, (2, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), 1, UINT8, NARROW),
    "negative padding": ((1, 6, 6, 8), (2, 3), 3, (1, 1), ((-1, 2), (1, -2)), (1, 1), (1, 1), 1, UINT8_MIDDLE, NARROW),
    "dilated": ((1, 8, 7, 8), (3, 2), 3, (1, 2), ((2, 2), (0, 1)), (1, 1), (2, 3), 1, INT8, NARROW),
    "transposed": ((2, 3, 4, 8), (3, 3), 3, (1, 1), ((2, 1), (1, 2)), (2, 3), (1, 1), 1, INT8_HIGH, NARROW),
    "transposed, cropped": ((1, 4, 4, 2), (2, 2), 3, (1, 1), ((-1, 1), (0, -2)), (2, 2), (1, 1), 1, INT8, NARROW),
    "groups": ((2, 4, 4, 6), (2, 2), 4, (1, 2), ((1, 0), (0, 1)), (1, 1), (1, 1), 2, UINT8_MIDDLE, NARROW),
    "depthwise": ((2, 5, 4, 6), (3, 3), 6, (2, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 6, INT8_LOW, NARROW),
    "depthwise, twice": ((2, 5, 4, 3), (2, 3), 6, (1, 1), ((0, 1), (2, 2)), (1, 1), (1, 2), 3, UINT8, NARROW),
    "depthwise, 16 bits": ((1, 4, 4, 3), (2, 2), 3, (1, 1), ((1, 0), (0, 1)), (1, 1), (1, 1), 3, INT16_ODD, NARROW),
    "16 bits": ((1, 4, 4, 9), (2, 2), 3, (1, 1), ((1, 0), (0, 1)), (1, 1), (1, 1), 1, INT16, NARROW),
    "wide weights": ((1, 4, 4, 9), (2, 2), 3, (1, 1), ((0, 0), (1, 1)), (1, 1), (1, 1), 1, INT8, WIDE),
    "4 bits": ((1, 4, 4, 9), (2, 2), 3, (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 1, INT4, INT4),
    "line": ((3, 9, 8), (4,), 3, (2,), ((3, 0),), (1,), (2,), 1, UINT8_HIGH, NARROW),
    "volume": ((1, 3, 4, 3, 8), (2, 2, 2), 3, (1, 2, 1), ((1, 0), (0, 1), (1, 1)), (1,) * 3, (1,) * 3, 1, INT8, NARROW),
}  # fmt: skip


def attributes_of(case, layouts) -> dict:
    _, _, _, strides, padding, lhs_dilation, rhs_dilation, groups, _, _ = case
    lhs, rhs, out = layouts
    return {
        "strides": list(strides),
        "padding": [list(pair) for pair in padding],
        "lhs_dilation": list(lhs_dilation),
        "rhs_dilation": list(rhs_dilation),
        "groups": groups,
        "lhs_layout": lhs,
        "rhs_layout": rhs,
        "out_layout": out,
        "weight": 1,
        "channels": [[out[1], rhs[0]]],
        "rank": len(lhs),
        "permutation": None,
    }


def channels_last(rank: int):
    spatial = list(range(1, rank + 1))
    return [0, rank + 1, *spatial], [rank + 1, rank, *range(rank)], [0, rank + 1, *spatial]


def codes_of(case):
    x_shape, window, features, *_, groups, x_grid, w_grid = case
    rng = np.random.default_rng(sum(x_shape) + features)
    w_shape = (*window, x_shape[-1] // groups, features)
    return rng, x_grid.codes(rng, x_shape), w_grid.codes(rng, w_shape)


def accumulator(case, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return conv(case[8].centered(x), w.astype(object), *case[3:8])


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(name):
    case = CASES[name]
    rng, x, w = codes_of(case)
    acc, out = accumulator(case, x, w), INT8
    constants = weighted_constants(rng, acc, (acc.shape[-1],), out)
    attributes = {**attributes_of(case, channels_last(x.ndim - 2)), "rule": "nearest_even"}
    graph = graph_of("conv", [(x.shape, case[8])], (acc.shape, out), {"kernel": w, **constants}, attributes)
    check(graph, [x], finish_weighted(acc, constants, out, "nearest_even"))


def test_other_layouts():
    # x and y as NCHW, the kernel as OIHW: the layouts of torch and ONNX
    case = CASES["few channels"]
    rng, x, w = codes_of(case)
    acc, out = np.moveaxis(accumulator(case, x, w), -1, 1), UINT8
    constants = weighted_constants(rng, acc, (acc.shape[1], 1, 1), out)
    layout = [0, 1, 2, 3]
    attributes = {**attributes_of(case, (layout, layout, layout)), "rule": "double_round"}
    kernel = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    codes = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    graph = graph_of("conv", [(codes.shape, case[8])], (acc.shape, out), {"kernel": kernel, **constants}, attributes)
    check(graph, [codes], finish_weighted(acc, constants, out, "double_round"))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["many channels", "groups", "depthwise, twice", "16 bits", "line"])
def test_all_strategies_agree_with_xla(name):
    case = CASES[name]
    _, window, _, strides, _, _, dilation, groups, *_ = case
    _, x, w = codes_of(case)
    signed = np.asarray(accumulate.signed(jnp.asarray(x)))
    none, once = [(0, 0)] * len(window), (1,) * len(window)
    expected = conv(signed.astype(object), w.astype(object), strides, none, once, dilation, groups)
    layout = channels_last(len(window))

    def strategies(x, w):
        wide = (x.astype(jnp.int32), w.astype(jnp.int32))
        yield convolution.conv(x, w, strides=strides, rhs_dilation=dilation, groups=groups, layout=layout)
        yield convolution.xla_conv(*wide, strides, dilation, groups)
        yield convolution.grouped(x, w, strides, dilation, groups)
        if groups == 1:
            yield convolution.patches(x, w, strides, dilation)
        if groups == x.shape[-1]:
            yield convolution.depthwise(x, w, strides=strides, rhs_dilation=dilation, layout=layout, dtype=jnp.int32)
            floats = (x.astype(jnp.float32), w.astype(jnp.float32))
            exact = convolution.depthwise(
                *floats, strides=strides, rhs_dilation=dilation, layout=layout, dtype=jnp.float32
            )
            yield exact.astype(jnp.int32)
        numbers = lax.ConvDimensionNumbers(*(tuple(axes) for axes in layout))
        yield lax.conv_general_dilated(
            *wide,
            strides,
            none,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
            preferred_element_type=jnp.int32,
        )

    results = [np.asarray(r) for r in jax.jit(lambda x, w: list(strategies(x, w)))(signed, w)]
    assert len(results) >= 4
    for result in results:
        assert result.dtype == np.int32
        assert np.array_equal(result.astype(object), expected)
