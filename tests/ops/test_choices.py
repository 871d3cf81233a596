"""Choices, comparisons, indices and grouped weights: kernels against numpy and Python's unbounded numbers."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.ops.constant_codes import threshold
from qjax.run.interpreter import Interpreter
from tests.export.emit.nodes import of_operations

NODES = of_operations()


def ran(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    graph, codes = NODES[name]
    (y,) = Interpreter(graph)(*codes)
    declared = graph.tensors["y"]
    assert (tuple(y.shape), y.dtype.name) == (declared.shape, declared.dtype)
    return np.asarray(y), codes


FIVE = np.arange(-50, 50, 20)

ORACLES = {
    "select": lambda m, a, b: np.where(m, b, a),
    "select_rows": lambda m, a: np.where(m, -128, a),
    "select_wide": lambda m, a: np.where(m, a, FIVE),
    "select_integers": lambda m, a, b: np.where(m, b, a),
    "select_masks": lambda m, a, b: np.where(m, b, a),
    "choose": lambda m: np.where(m, 120, -7),
    "compare": lambda a, b: a >= b,
    "compare_left": lambda a: a < FIVE + 120,
    "compare_never": lambda a: np.zeros(a.shape, bool),
    "compare_integers": lambda a, b: a != b,
    "and": lambda a, b: a & b,
    "not": lambda a: ~a,
    "all": lambda a: a.all(axis=1),
    "any": lambda a: a.any(axis=(1, 2)),
    "count": lambda a: a.sum(axis=0),
    "products": lambda a, b: a * b,
    "as_integers": lambda a: a.astype(int),
    "as_mask": lambda a: a != 0,
    "turned_mask": lambda a: a.transpose(2, 0, 1),
    "joined_masks": lambda a, b: np.concatenate([a, np.broadcast_to(b, (3, 4, 5))], axis=2),
    "repeated_part": lambda a, b: np.concatenate([a, np.broadcast_to(b, (3, 4, 5))], axis=1),
    "cummax": lambda a: np.maximum.accumulate(a[..., ::-1], axis=2)[..., ::-1],
    "cummin": lambda a: np.minimum.accumulate(a, axis=1),
    "argmax": lambda a: np.argmax(a, axis=2),
    "argmin": lambda a: np.argmin(a, axis=1),
    "top_values": lambda a: -np.sort(-a.astype(int), axis=2)[..., :3],
    "top_places": lambda a: np.argsort(-a.astype(int), axis=1, kind="stable")[:, :2],
    "maximum": lambda a, b: np.maximum(a, b),
    "minimum": lambda a: np.minimum(a, FIVE),
    "min": lambda a: a.min(axis=1),
    "take": lambda a, at: a[:, np.clip(at[..., 0], 0, 3)],
    "take_along": lambda a, at: np.take_along_axis(a, np.clip(at, 0, 3), axis=1),
    "fill": lambda a: np.broadcast_to(np.asarray(NODES["fill"][0].tensors["value"].value), (6, 2, 5)),
}


@pytest.mark.parametrize("name", ORACLES)
def test_kernels(name):
    y, codes = ran(name)
    assert np.array_equal(y.astype(int), ORACLES[name](*codes).astype(int))
    assert len(np.unique(y)) > 1 or name in ("compare_never", "any")


def test_pad_value():
    y, (x,) = ran("pad_value")
    expected = np.full((4, 9, 7), 99)
    expected[1:, :9:3, :5] = x[:, :3]
    expected[1:, 9:, :5] = 99
    assert np.array_equal(y.astype(int), expected)


@pytest.mark.parametrize("name", ["number", "cumulative_sum"])
def test_sums(name):
    y, (x,) = ran(name)
    acc = x.astype(object) if name == "number" else np.cumsum(x.astype(object) + 7, axis=1)
    exact = [Fraction(int(a) * (2**20 // 3) + 12345, 2**20) for a in acc.ravel()]
    steps = [round(e) if name == "number" else e.numerator // e.denominator for e in exact]
    assert np.array_equal(y.ravel().astype(int), np.clip(np.array(steps) - 7, -128, 127))


def test_prod():
    y, (x,) = ran("prod")
    acc = np.prod(x.astype(object) + 7, axis=1)
    steps = [(int(a) * (2**20 // 3) + 12345) // 2**20 for a in acc.ravel()]
    assert np.array_equal(y.ravel().astype(int), np.clip(np.array(steps) - 7, -128, 127))


def test_grouped_dot():
    y, (x,) = ran("grouped_dot")
    graph = NODES["grouped_dot"][0]
    constant = {role: np.asarray(graph.tensors[role].value).astype(object) for role in graph.nodes[0].constants}
    for m in range(6):
        for n in range(5):
            total = 12345
            for group in range(3):
                row = x[m, 4 * group : 4 * group + 4].astype(object) + 7
                total += int(row @ constant["weights"][group, :, n]) * constant[f"factor{group}"][n, 0]
            assert y[n, m] == min(max(round(Fraction(total, 2**20)) - 7, -128), 127)


@pytest.mark.parametrize(
    ("name", "wraps"), [("embed_rows", True), ("embed_rows_columns", False), ("embed_rows_groups", False)]
)
def test_embed_rows(name, wraps):
    y, (indices,) = ran(name)
    graph = NODES[name][0]
    output: Any = graph.tensors[graph.outputs[0]].quantization
    held = {role: np.asarray(graph.tensors[role].value).astype(object) for role in graph.nodes[0].constants}
    table = held["weights"].reshape(10, 4)
    high, wide = held["factor0"].shape
    for place in np.ndindex(indices.shape):
        index = int(indices[place])
        row = min(max(index + 10 if wraps and index < 0 else index, 0), 9)
        for column in range(4):
            own = row * high // 10, column * wide // 4
            exact = Fraction(table[row, column] * held["factor0"][own], 2 ** int(held["shift"][own]))
            code = min(max(round(exact) + int(output.zero_point), output.qmin), output.qmax)
            assert y[(*place, column)] == code


@pytest.mark.parametrize("function", ["gt", "ge", "lt", "le", "eq", "ne"])
def test_thresholds_are_exact(function):
    """Steps that compare as reals do: the quotient is formed in Fractions."""
    rng = np.random.default_rng(4)
    scale = np.float32(rng.uniform(1e-3, 1))
    multiples = np.float32(scale * rng.integers(-200, 200, 20).astype(np.float32))
    values = np.concatenate([rng.normal(size=20), multiples, np.nextafter(multiples, 9), [0, 1e30, -np.inf]])
    values = values.astype(np.float32)
    found = threshold(function, values, scale)
    traced = jax.jit(lambda v, s: threshold(function, v, s))(values, scale)
    assert np.array_equal(found, traced)
    steps = range(-260, 260, 7)
    for value, t in zip(values, np.asarray(found), strict=True):
        exact = Fraction(float(np.clip(value, -3e38, 3e38)))
        near = [int(exact / Fraction(float(scale)) // 1) + d for d in (-1, 0, 1)] if abs(value) < 1e3 else []
        for q in (*steps, *near):
            real = Fraction(q) * Fraction(float(scale))
            pairs = {"gt": (real > exact, q > t), "ge": (real >= exact, q >= t), "lt": (real < exact, q < t)}
            pairs |= {"le": (real <= exact, q <= t), "eq": (real == exact, q == t), "ne": (real != exact, q != t)}
            assert pairs[function][0] == pairs[function][1], (value, scale, q, int(t))


def test_a_learned_filling_gets_a_gradient():
    from qjax.numerics.affine import QParams, QSpec
    from qjax.ops.base import Quantized
    from qjax.ops.constant_codes import steps_on

    params = QParams(np.float32(0.5), np.int32(3), QSpec(bits=8, symmetric=False))
    x = Quantized(jnp.zeros((2,)), jnp.full((1,), 0.5, jnp.float32), params)
    value, gradient = jax.value_and_grad(lambda v: jnp.sum(steps_on(v, x)))(jnp.float32(1.3))
    assert (float(value), float(gradient)) == (3.0, 2.0)
    # beyond the grid its end, and no gradient
    assert jax.value_and_grad(lambda v: jnp.sum(steps_on(v, x)))(jnp.float32(1e6)) == (124.0, 0.0)
