"""Numpy computes what XLA computes: every kernel, and every primitive at the numbers where libraries differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qjax.jaxprs.evaluator import Evaluator, evaluate, run_in_numpy
from qjax.jaxprs.rules import RULES
from qjax.run.interpreter import Interpreter
from qjax.support.errors import Unsupported
from tests.export.emit.test_every_target import Everything, chosen, diagonal, merged

pytestmark = pytest.mark.compiled
INTEGERS = ("int8", "uint8", "int16", "int32", "uint32")
ORDINARY = [0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 127.5, 3e9, -3e9, 2**31, np.inf, -np.inf, np.nan]
SMALL = [1e-40, -1e-45, 2.0**-126, -(2.0**-126), 3 * 2.0**-126]
FLOATS = np.array([*ORDINARY, *SMALL], np.float32)


def edges(dtype: str) -> np.ndarray:
    """Both ends, what is around zero, and a few others."""
    info = np.iinfo(dtype)
    values = {info.min, info.min + 1, 0, 1, 2, 7, 31, 32, info.max - 1, info.max, -1, -2, -7, info.max // 3}
    return np.array(sorted(v for v in values if info.min <= v <= info.max), dtype)


def assert_equal(function: Callable[..., Any], *arguments: Any) -> None:
    found = jax.tree.leaves(run_in_numpy(function)(*arguments))
    wanted = jax.tree.leaves(jax.jit(function)(*arguments))
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        # of NaN there is one; zeros have signs
        same = np.logical_or(np.asarray(a).view(f"V{a.itemsize}") == np.asarray(b).view(f"V{b.itemsize}"), a != a)
        assert a.shape == b.shape
        assert np.all(same), (a, b)


def assert_kernels_equal(named):
    graph, codes = merged(named)
    interpreter = Interpreter(graph)
    constants = interpreter.constants
    found = run_in_numpy(interpreter.outputs)(constants, codes)
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    wanted = jax.jit(interpreter.outputs, compiler_options=fast)(constants, codes)
    wrong = [node.name for node, a, b in zip(graph.nodes, found, wanted, strict=True) if not np.array_equal(a, b)]
    assert not wrong


def test_every_kernel_and_every_arithmetic():
    assert_kernels_equal(diagonal())


@pytest.mark.exhaustive
def test_every_kernel_under_every_arithmetic():
    assert_kernels_equal(chosen(Everything().named))


PAIRS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "left": lax.shift_left,
    "right": lax.shift_right_arithmetic,
    "logical": lax.shift_right_logical,
    "eq": lax.eq,
    "lt": lax.lt,
    "ge": lax.ge,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", INTEGERS)
def test_pairs_of_integers(dtype):
    x = edges(dtype)
    a, b = (m.reshape(-1) for m in np.meshgrid(x, x))
    assert_equal(lambda a, b: {name: function(a, b) for name, function in PAIRS.items()}, a, b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_single_integers(dtype):
    ones = {"neg": lax.neg, "not": lax.bitwise_not, "sign": lax.sign, "clz": lax.clz, "ones": lax.population_count}
    casts = {
        name: lambda x, name=name: x.astype(name) for name in (*INTEGERS, "bool", "float32", "float16", "bfloat16")
    }
    powers = {f"power {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (1, 2, 3)}
    signed = {"abs": lax.abs} if dtype.startswith("i") else {}
    functions = ones | casts | powers | signed
    assert_equal(lambda x: {name: function(x) for name, function in functions.items()}, edges(dtype))


def test_floats():
    functions = {
        **{name: lambda x, name=name: x.astype(name) for name in (*INTEGERS, "bool", "float16", "bfloat16")},
        "even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
        "away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
        "floor": lax.floor,
        "ceil": lax.ceil,
        "sqrt": lambda x: lax.sqrt(lax.abs(x)),
        "finite": lax.is_finite,
        "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        "bits of one": lambda x: lax.bitcast_convert_type(x[3], jnp.uint32),
        "bytes": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        "sign": lax.sign,
        "negative": lax.neg,
        "abs": lax.abs,
        "chosen": lambda x: lax.select(x > 1, x, -x),
        "next": lambda x: lax.nextafter(x, np.float32(1)),
        "power": lambda x: lax.integer_pow(x, 2),
        "greatest": lambda x: jnp.max(x[-3:]),
        "clamp": lambda x: lax.clamp(np.float32(-1), x, np.float32(2)),
        "product": lambda x: x * np.float32(3),
    }
    assert_equal(lambda x: {name: function(x) for name, function in functions.items()}, FLOATS)


def test_pairs_of_floats():
    a, b = (m.reshape(-1) for m in np.meshgrid(FLOATS, FLOATS))
    functions = {name: PAIRS[name] for name in ("add", "sub", "mul", "div", "rem", "eq", "lt", "ge")}
    assert_equal(lambda a, b: {name: function(a, b) for name, function in functions.items()}, a, b)


X = np.random.default_rng(0).integers(-128, 128, (4, 5, 6)).astype(np.int8)
ROWS = np.array([[0, 3], [-1, 4], [9, 2]], np.int32)
KERNEL = np.random.default_rng(1).integers(-128, 128, (3, 2, 2, 4)).astype(np.int8)

MOVES: dict[str, Callable[[Any], Any]] = {
    "pad": lambda x: lax.pad(x, np.int8(3), ((1, 2, 0), (-1, 0, 2), (0, -2, 1))),
    "slice": lambda x: x[1:4:2, ::-1, 2:5],
    "reversed": lambda x: lax.rev(x, (0, 2)),
    "transposed": lambda x: x.transpose(2, 0, 1),
    "reshaped in another order": lambda x: lax.reshape(x, (12, 10), (2, 0, 1)),
    "broadcast": lambda x: lax.broadcast_in_dim(x[:, :1], (4, 3, 6), (0, 1, 2)),
    "joined": lambda x: jnp.concatenate([x, x[:, :2]], 1),
    "stacked": lambda x: jnp.stack([x, x], 1),
    "split": lambda x: jnp.split(x, [2, 3], 1),
    "dynamic": lambda x: lax.dynamic_slice(x, (np.int32(3), np.int32(-2), np.int32(9)), (2, 2, 2)),
    "updated": lambda x: lax.dynamic_update_slice(
        x, x[:2, :2, :2] + np.int8(1), (np.int32(3), np.int32(-2), np.int32(9))
    ),
    "clipped rows": lambda x: jnp.take(x, ROWS, axis=1, mode="clip"),
    "filled rows": lambda x: jnp.take(x, ROWS, axis=1, mode="fill"),
    "places": lambda x: x[ROWS[:, 0], :, ROWS[:, 1]],
    "along": lambda x: jnp.take_along_axis(x, jnp.abs(x.astype(jnp.int32)) % 5, axis=1),
    "sum": lambda x: jnp.sum(x, (0, 2), dtype=jnp.int32),
    "wrapping sum": lambda x: jnp.sum(x, (0, 2), dtype=jnp.int8),
    "extremes": lambda x: (x.max(1), x.min((0, 1)), x.argmax(2), x.argmin(0)),
    "logic": lambda x: ((x > 0).any(1), (x > 0).all(1)),
    "cumulative": lambda x: (lax.cumsum(x, 1), lax.cumsum(x, 1, reverse=True), lax.cummax(x, 2), lax.cummin(x, 0)),
    "sorted": lambda x: (jnp.sort(x, 1), jnp.argsort(x, 2), lax.sort((x, x + np.int8(1)), dimension=0, num_keys=1)),
    "greatest": lambda x: lax.top_k(x, 3),
    "windows": lambda x: lax.reduce_window(x, np.int8(-128), lax.max, (1, 2, 3), (1, 2, 1), "SAME"),
    "spread windows": lambda x: lax.reduce_window(
        x.astype(np.int32), np.int32(5), lax.add, (2, 2, 1), (1, 1, 2), ((1, 0), (0, 2), (0, 0)), (1, 2, 1), (2, 1, 1)
    ),
    "joint reduction": lambda x: lax.reduce(
        (x, x), (np.int8(127), np.int8(-128)), lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1])), (1,)
    ),
    "product": lambda x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32),
    "wide product": lambda x: lax.dot_general(
        x.astype(jnp.int32) << 20, x.astype(jnp.int32) << 20, (((1, 2), (1, 2)), ((), ()))
    ),
    "choice": lambda x: lax.select_n(jnp.abs(x.astype(jnp.int32)) % 3, x, -x, x * np.int8(2)),
    "iota": lambda x: lax.broadcasted_iota(jnp.int16, x.shape, 1) + x.astype(jnp.int16),
    "loop": lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * np.int8(3)), (0, x)),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, (c, row.max())), x[0], x, reverse=True),
    "branch": lambda x: lax.cond(x[0, 0, 0] > 0, lambda x: x + np.int8(1), lambda x: -x, x),
    "branches": lambda x: lax.switch(np.int32(7), [lambda x: x, lambda x: -x], x),
    "places of a platform": lambda x: lax.platform_dependent(x, cpu=lambda x: x + x, default=lambda x: x * np.int8(2)),
    "convolution": lambda x: lax.conv_general_dilated(
        x.reshape(1, 4, 5, 6),
        jnp.asarray(KERNEL.reshape(2, 2, 2, 6)),
        (1, 2),
        ((1, 2), (0, 1)),
        (2, 1),
        (1, 2),
        ("NHWC", "HWIO", "NHWC"),
        feature_group_count=3,
        preferred_element_type=jnp.int32,
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_reductions_and_control_flow(name):
    assert_equal(MOVES[name], X)


WITHOUT_EFFECT = {
    *("sharding", "out_sharding", "weak_type", "precision", "unique_indices", "indices_are_sorted"),
    # what these decide is the shape and the dtype of the result
    *(
        "new_sizes",
        "shape",
        "dtype",
        "index_dtype",
        "new_dtype",
        "preferred_element_type",
        "is_stable",
        # a function of Python, beside its program
        "computation",
    ),
}


def test_every_parameter_of_a_primitive_is_read():
    """A rule that ignores one computes another function as soon as somebody sets it."""
    ignored: dict[str, set[str]] = {}

    def recorded(name, rule):
        def run(out, params, *operands):
            read = Recorded(params)
            result = rule(out, read, *operands)
            ignored[name] = ignored.get(name, params.keys()) & params.keys() - read.keys_read - WITHOUT_EFFECT
            return result

        return run

    evaluator = Evaluator({name: recorded(name, rule) for name, rule in RULES.items()})
    for function in MOVES.values():
        evaluator.evaluate(jax.make_jaxpr(function)(X), X)
    # the axes that are gone follow from the shape of the result
    assert {name: names for name, names in ignored.items() if names} == {"squeeze": {"dimensions"}}


class Recorded(dict[str, Any]):
    def __init__(self, params):
        super().__init__(params)
        self.keys_read: set[str] = set()

    def __getitem__(self, key):
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jnp.exp, "exp"),
        (jnp.sum, "reduce_sum"),
        (lambda x: x @ x, "dot_general"),
        (lambda x: lax.reduce_window(x, np.float32(0), lax.add, (2,), (1,), "VALID"), "reduce_window"),
    ],
)
def test_what_depends_on_who_computes_it_is_refused(function, name):
    x = np.ones(4, np.float32)
    with pytest.raises(Unsupported, match=f"the primitive '{name}.*' of float32"):
        evaluate(jax.make_jaxpr(function)(x), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.astype(jnp.int4),
        lambda x: lax.sort((x, x), is_stable=False, num_keys=1),
        lambda x: lax.integer_pow(x.astype(jnp.float32), 3),
    ],
)
def test_what_numpy_does_otherwise_is_refused(function):
    with pytest.raises(Unsupported, match="numpy cannot replace XLA"):
        evaluate(jax.make_jaxpr(function)(X[0, 0]), X[0, 0])


def test_within_a_trace_it_is_the_function_itself():
    double = run_in_numpy(lambda x: x * 2)
    assert np.array_equal(jax.jit(double)(X), X * np.int8(2))
    assert np.array_equal(jax.vmap(double)(jnp.asarray(X)), X * np.int8(2))


def test_one_trace_for_a_shape():
    traces: list[Any] = []

    def double(x: Any) -> Any:
        traces.append(x)
        return x * np.int8(2)

    call = run_in_numpy(double)
    for x in (X, X + np.int8(1), X[0]):
        assert np.array_equal(call(x), x * np.int8(2))
    assert len(traces) == 2
