"""Softmax, normalisations and quotients from real scales to codes: against the real functions of the same codes."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

from decimal import Decimal, localcontext
from fractions import Fraction

import jax
import numpy as np
import pytest

import qjax.ops
from qjax import targets
from qjax.numerics import softmax as runtimes
from qjax.ops import Operand, Preparation
from qjax.ops.epilogue import Affine
from qjax.run.interpreter import Interpreter
from tests.numerics.test_normalize import reals
from tests.ops.nodes import INT8, INT16, UINT8_MIDDLE, Grid, graph_of


def operand(shape: tuple[int, ...], grid: Grid | str, scale: float) -> Operand:
    if not isinstance(grid, Grid):
        return Operand(shape, str(grid))
    return Operand(shape, grid.dtype, np.float32(scale), np.int32(grid.zero_point), grid.qmin, grid.qmax)


def codes_of(op, inputs, output, attributes, target="nearest_even", shape=None, **held):
    """The codes, and the node's attributes.

    inputs: (codes, grid, scale); output: (grid, scale). shape: of the output, by default that of the first input.
    """
    shapes = tuple(operand(x.shape, grid, scale) for x, grid, scale in inputs)
    out = operand(inputs[0][0].shape if shape is None else shape, *output)
    given = Preparation(attributes, held, shapes, out, Affine.identity(), targets.get(target))
    made = qjax.ops.get(op).prepare(given)
    described = [(x.shape, grid) for x, grid, _ in inputs]
    known = {**attributes, **made.attributes}
    graph = graph_of(op, described, (out.shape, output[0]), dict(made.constants), known)
    (y,) = Interpreter(graph)(*(x for x, _, _ in inputs))
    return np.asarray(y), known


def real_softmax(row, scale):
    with localcontext() as context:
        context.prec = 40
        step = Decimal(float(np.float32(scale)))
        powers = [(step * (c - max(row))).exp() for c in row]
        total = sum(powers)
        return [Fraction(p / total) for p in powers]


@pytest.mark.parametrize(
    ("grid", "scale", "out", "out_scale"),
    [(INT8, 0.06, INT8, 0.0039), (INT16, 3e-4, INT16, 2.0**-15), (UINT8_MIDDLE, 1.7, INT8, 2.0**-8)],
)
def test_softmax_is_within_its_error(grid, scale, out, out_scale):
    """1/2 + (n + 3) / (2^31 s_y) + 2^-15 steps."""
    length = 200
    x = grid.codes(np.random.default_rng(1), (5, length))
    y, _ = codes_of("softmax", [(x, grid, scale)], (out, out_scale), {"axes": [1]})
    step = Fraction(float(np.float32(out_scale)))
    bound = Fraction(1, 2) + (length + 3) / (2**31 * step) + Fraction(1, 2**15)
    for row, found in zip(x.tolist(), y.tolist(), strict=True):
        for share, code in zip(real_softmax(row, scale), found, strict=True):
            want = min(max(share / step + out.zero_point, out.qmin), out.qmax)
            assert abs(want - code) <= bound


@pytest.mark.parametrize("op", ["log_softmax", "logsumexp"])
@pytest.mark.parametrize(
    ("grid", "scale", "out", "out_scale"),
    [(INT8, 0.06, INT8, 0.06), (INT16, 3e-4, INT16, 4e-4), (UINT8_MIDDLE, 1.7, INT16, 0.02), (INT8, 2e-5, INT16, 3e-4)],
)
def test_logarithms_of_softmax_are_within_their_error(op, grid, scale, out, out_scale):
    """1/2 + 2^-14 + (2^-21 + n 2^-30 + R 2^-28) / s_y steps."""
    length = 200
    x = grid.codes(np.random.default_rng(1), (5, length))
    x[0], x[1] = grid.qmin, x[1] // 9
    attributes = {"axes": [1]} | ({"keep": True} if op == "logsumexp" else {})
    y, _ = codes_of(op, [(x, grid, scale)], (out, out_scale), attributes, shape=(5, 1) if op == "logsumexp" else None)
    step, reach = (Fraction(float(np.float32(s))) for s in (out_scale, scale * (grid.qmax - grid.qmin)))
    bound = Fraction(1, 2) + Fraction(1, 2**14) + (Fraction(1, 2**21) + Fraction(length, 2**30) + reach / 2**28) / step
    with localcontext() as context:
        context.prec = 40
        unit = Decimal(float(np.float32(scale)))
        for row, found in zip(grid.centered(x).tolist(), y.tolist(), strict=True):
            total = sum((unit * (c - max(row))).exp() for c in row).ln() + unit * max(row)
            wanted = [total] if op == "logsumexp" else [unit * c - total for c in row]
            for real, code in zip(wanted, found, strict=True):
                want = min(max(Fraction(real) / step + out.zero_point, out.qmin), out.qmax)
                assert abs(want - code) <= bound


@pytest.mark.parametrize("name", [n for n in targets.names() if targets.get(n).softmax is not None])
def test_softmax_of_a_runtime(name):
    """Its own method over the last axis, TFLite's on their own grid, and the exact one for everything else."""
    grid = Grid("int8", -128, 127, -128)
    x = INT8.codes(np.random.default_rng(2), (4, 19))
    target = targets.get(name)
    assert target.softmax is not None
    anywhere = target.softmax == "onnx"
    for scale, native in ((2.0**-8, target.unit_grids or anywhere), (0.004, anywhere)):
        y, known = codes_of("softmax", [(x, INT8, 0.1)], (grid, scale), {"axes": [1]}, name)
        assert known["method"] == (target.softmax if native else "exact")
        if native:
            constants = runtimes.prepare(target.softmax, np.float32(0.1), length=19, y_scale=np.float32(scale))
            assert np.array_equal(y, runtimes.softmax(x, constants))
    _, known = codes_of("softmax", [(x, INT8, 0.1)], (grid, 2.0**-8), {"axes": [0]}, name)
    assert known["method"] == "exact"


@pytest.mark.parametrize("method", ["gemmlowp", "float32", "uint16", "onnx"])
def test_constants_of_a_runtime_in_a_trace(method):
    target = targets.Target("any", softmax=method, unit_grids=True)

    def constants(scale):
        x, y = operand((4, 19), INT8, 0.0), operand((4, 19), Grid("int8", -128, 127, -128), 2.0**-8)
        given = Operand(x.shape, x.dtype, scale, x.zero_point, x.qmin, x.qmax)
        known = Preparation({"axes": [1]}, {}, (given,), y, Affine.identity(), target)
        return dict(qjax.ops.get("softmax").prepare(known).constants)

    host, traced = constants(np.float32(0.037)), jax.jit(constants)(np.float32(0.037))
    assert host.keys() == traced.keys()
    assert all(np.array_equal(host[role], traced[role]) for role in host)


@pytest.mark.parametrize(
    ("grid", "scale", "out", "out_scale", "center", "epsilon"),
    [(INT8, 0.03, INT8, 0.03, True, 1e-5), (INT16, 1e-4, INT16, 2e-4, True, 1e-3), (INT8, 0.2, INT8, 0.05, False, 0.0)],
)
def test_normalisation_is_within_its_error(grid, scale, out, out_scale, center, epsilon):
    """1/2 + 2^-15 + |y| 2^-28 + sqrt(n) G 2^-30 steps, y from beta, with gammas of both signs, nearly 0 and 0."""
    rng = np.random.default_rng(4)
    length = 48
    x = grid.codes(rng, (6, length))
    x[3] = x[3, 0]
    gamma, beta = (rng.normal(size=length).astype(np.float32) for _ in range(2))
    gamma[5], gamma[6] = 0, 1e-6
    attributes = {"axes": [1], "center": center, "divisor": 0, "epsilon": epsilon, "feature_axes": [1], "groups": 1}
    attributes["joined"] = "add"
    y, _ = codes_of("normalize", [(x, grid, scale)], (out, out_scale), attributes, scale=gamma, bias=beta)
    step = Fraction(float(np.float32(out_scale)))
    for row, found in zip(grid.centered(x).tolist(), y.tolist(), strict=True):
        for index, t in enumerate(reals(row, scale, center, length, epsilon, "add")):
            gain = Fraction(float(gamma[index])) / step
            want = t * gain + Fraction(float(beta[index])) / step + out.zero_point
            bound = Fraction(1, 2) + Fraction(1, 2**15) + abs(t * gain) / 2**28 + 7 * abs(gain) / 2**30
            assert abs(min(max(want, out.qmin), out.qmax) - found[index]) <= bound


def test_quotients():
    rng = np.random.default_rng(6)
    a, b = INT8.codes(rng, (40, 30)), UINT8_MIDDLE.codes(rng, (40, 1))
    y, _ = codes_of("divide", [(a, INT8, 0.03), (b, UINT8_MIDDLE, 0.7)], (INT8, 0.004), {})
    ratio = Fraction(float(np.float32(0.03))) / Fraction(float(np.float32(0.7))) / Fraction(float(np.float32(0.004)))
    top, below = INT8.centered(a), np.broadcast_to(UINT8_MIDDLE.centered(b), a.shape)
    assert (below == 0).any()
    for p, q, code in zip(top.ravel(), below.ravel(), y.ravel().tolist(), strict=True):
        if q == 0:
            assert code == (INT8.zero_point if p == 0 else INT8.qmax if p > 0 else INT8.qmin)
        else:
            want = min(max(p * ratio / int(q) + INT8.zero_point, INT8.qmin), INT8.qmax)
            assert abs(want - code) <= Fraction(1, 2) + Fraction(1, 2**18)
