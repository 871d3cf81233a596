"""Every rule of requantization against Python integers, and the same codes in every transform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.numerics import (
    Multiplier,
    Real,
    Rule,
    get_rule,
    quantize_multiplier,
    register_rule,
    requantize,
    rule_names,
)
from qjax.numerics.rules import registry
from tests.numerics.exact import RULES

INT32: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}
SHIFTS = np.arange(-31, 31, dtype=np.int32)
MULTIPLIERS = [2**30, 2**31 - 1, 2**30 + 1, 3 * 2**29, 5 * 2**28, 1518500250, 0]


def edge_accumulators() -> list[int]:
    """Zero, both ends, powers of two and odd multiples: with M = 2^30 or 3 * 2^29 these make the ties."""
    values = {0, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1}
    for k in range(31):
        values |= {s * (m * 2**k + d) for s in (1, -1) for m in (1, 3, 5) for d in (-1, 0, 1)}
    return sorted(v for v in values if -(2**31) <= v < 2**31)


def multiplier(m, shift) -> Multiplier:
    m, shift = np.broadcast_arrays(np.asarray(m, np.int32), np.asarray(shift, np.int32))
    return Multiplier(m, shift)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.sampled(2)
def test_edges_for_every_shift(rule):
    values = edge_accumulators()
    acc = np.array(values, np.int32)[:, None]
    for m in MULTIPLIERS:
        want = [[RULES[rule](v, m, s) for s in SHIFTS.tolist()] for v in values]
        got = requantize(acc + np.zeros_like(SHIFTS), multiplier(m, SHIFTS), rule=rule, **INT32)
        assert got.dtype == jnp.int32
        assert np.array_equal(np.asarray(got), np.array(want, np.int32)), m


def integer_rule(rule: str, acc: np.ndarray, m: int, shift: int) -> np.ndarray:
    """The rule on an array of Python integers: the definitions again, by floor division."""

    def wrapped(x):
        return (x + 2**31) % 2**32 - 2**31

    def away(x, n):
        return np.where(x >= 0, (2 * x + n) // (2 * n), -((-2 * x + n) // (2 * n)))

    def up(x, n):
        return (2 * x + n) // (2 * n)

    right = max(-shift, 1 if rule == "ruy" else 0)
    left = shift + right if rule == "ruy" else max(shift, 0)
    p, n = acc * m, 2 ** (31 - shift)
    match rule:
        case "nearest_even":
            below, twice = p // n, 2 * (p - p // n * n)
            y = below + ((twice > n) | ((twice == n) & (below % 2 == 1)))
        case "nearest_away":
            y = away(p, n)
        case "single_round":
            y = up(p, n)
        case "double_round":
            return away(up(wrapped(acc * 2**left) * m, 2**31), 2**right)
        case "neon":
            return up(up(wrapped(acc * 2**left) * m, 2**31), 2**right)
        case "ruy":
            return up(wrapped(acc * 2**left) * m // 2**31, 2**right)
    return np.minimum(np.maximum(y, -(2**31)), 2**31 - 1)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.exhaustive), 7])
@pytest.mark.sampled(2)
def test_every_int16_accumulator_for_every_shift(rule, every):
    """In `make test` every seventh shift, with each of the multipliers and the shift that is none."""
    acc = np.arange(-(2**15), 2**15, dtype=np.int32)
    exact = acc.astype(object)
    kernel = jax.jit(lambda a, c: requantize(a, c, rule=rule, **INT32))
    for i, shift in list(enumerate(SHIFTS.tolist()))[3::every] if every > 1 else enumerate(SHIFTS.tolist()):
        m = MULTIPLIERS[i % 6]
        want = integer_rule(rule, exact, m, shift).astype(np.int64)
        assert np.array_equal(np.asarray(kernel(acc, multiplier(m, shift))), want), (m, shift)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8),
    st.lists(st.integers(2**30, 2**31 - 1), min_size=8, max_size=8),
    st.lists(st.integers(-31, 30), min_size=8, max_size=8),
)
def test_any_accumulator_and_multiplier(acc, m, shift):
    for rule, exact in RULES.items():
        want = [exact(*v) for v in zip(acc, m, shift, strict=True)]
        got = requantize(np.array(acc, np.int32), multiplier(m, shift), rule=rule, **INT32)
        assert np.asarray(got).tolist() == want


CODES = [(-2, 1), (-1, 1), (0, 3), (-8, 7), (-128, 127), (0, 255), (-32768, 32767), (0, 65535)]


@given(
    st.sampled_from(CODES),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16),
    st.floats(2.0**-40, 2.0**29, width=32),
    st.data(),
)
@settings(max_examples=20)
def test_zero_point_and_clamp(codes, acc, e, data):
    qmin, qmax = codes
    zero_point = data.draw(st.integers(qmin, qmax))
    m = quantize_multiplier(e)
    for rule, exact in RULES.items():
        rounded = [exact(a, int(m.multiplier), int(m.shift)) for a in acc]
        want = [max(qmin, min(qmax, v + zero_point)) for v in rounded]
        got = requantize(np.array(acc, np.int32), e, rule=rule, zero_point=zero_point, qmin=qmin, qmax=qmax)
        assert np.asarray(got).tolist() == want


def test_products_beyond_int32_saturate_before_and_after_the_zero_point():
    acc = np.array([2**31 - 1, -(2**31), 2**20, -(2**20)], np.int32)
    for rule in ("nearest_even", "nearest_away", "single_round"):
        y = requantize(acc, 2.0**29, rule=rule, **INT32)
        assert np.asarray(y).tolist() == [2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]
        for zero_point in (-128, 127):
            y = requantize(acc, 2.0**29, rule=rule, zero_point=zero_point)
            assert np.asarray(y).tolist() == [127, -128, 127, -128]


def layer(n: int = 4096) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accumulators (n, 16), a float32 scale and a zero point per channel."""
    rng = np.random.default_rng(1)
    acc = rng.integers(-(2**20), 2**20, (n, 16)).astype(np.int32)
    return acc, np.exp(rng.uniform(-9, -5, 16)).astype(np.float32), rng.integers(-5, 6, 16).astype(np.int32)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.sampled(2)
def test_per_channel_in_every_transform(rule):
    acc, scale, zero_point = layer()
    constants = list(zip(*quantize_multiplier(scale), strict=True))
    columns = [
        requantize(acc[:, c], Multiplier(*constants[c]), rule=rule, zero_point=int(zero_point[c])) for c in range(16)
    ]
    want = np.stack([np.asarray(c) for c in columns], 1)
    exact = [
        [RULES[rule](int(a), int(m), int(s)) for a, (m, s) in zip(row, constants, strict=True)] for row in acc[:64]
    ]
    assert np.array_equal(want[:64], np.clip(np.array(exact) + zero_point, -128, 127))

    def f(a, s):
        return requantize(a, s, rule=rule, zero_point=zero_point)

    m = quantize_multiplier(scale)
    results = {
        "eager": f(acc, scale),
        "jit, scale argument": jax.jit(f)(acc, scale),
        "jit, scale constant": jax.jit(lambda a: f(a, scale))(acc),
        "jit, real": jax.jit(lambda a, s: f(a, Real.of(s)))(acc, scale),
        "jit, multiplier argument": jax.jit(f)(acc, m),
        "jit, multiplier constant": jax.jit(lambda a: f(a, m))(acc),
        "vmap over rows": jax.vmap(f, (0, None))(acc, scale),
        "vmap over channels": jax.vmap(lambda a, c, z: requantize(a, c, rule=rule, zero_point=z), (1, 0, 0), 1)(
            acc, m, zero_point
        ),
        "scan": jax.lax.scan(lambda c, a: (c, f(a, m)), 0, acc)[1],
        "remat": jax.checkpoint(f)(acc, m),
        "real": f(acc, Real.of(scale)),
        "device arrays": f(jnp.asarray(acc), Multiplier(jnp.asarray(m.multiplier), jnp.asarray(m.shift))),
    }
    for name, y in results.items():
        assert y.dtype == jnp.int32, name
        assert np.array_equal(np.asarray(y), want), name
    with jax.enable_x64(True):
        assert np.array_equal(np.asarray(jax.jit(f)(acc, scale)), want)


def test_inside_the_gradient_of_something_else():
    acc, scale, _ = layer(8)

    def loss(w, a):
        codes = requantize(a, scale) + requantize(jnp.round(w).astype(jnp.int32), 0.25)
        return jnp.sum(w * codes.astype(jnp.float32))

    w = np.linspace(-40, 40, acc.size, dtype=np.float32).reshape(acc.shape)
    codes = requantize(acc, scale) + requantize(np.round(w).astype(np.int32), 0.25)
    assert np.array_equal(np.asarray(jax.jit(jax.grad(loss))(w, acc)), np.asarray(codes).astype(np.float32))


def every_dtype(jaxpr) -> set[str]:
    found = {str(v.aval.dtype) for v in [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]}
    for equation in jaxpr.eqns:
        found |= {str(v.aval.dtype) for v in [*equation.invars, *equation.outvars]}
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found |= every_dtype(inner)
    return found


@pytest.mark.parametrize("rule", sorted(RULES))
def test_no_float_in_the_program(rule):
    acc, scale, _ = layer(4)
    program = jax.make_jaxpr(lambda a, m: requantize(a, m, rule=rule, zero_point=3))(acc, quantize_multiplier(scale))
    assert every_dtype(program.jaxpr) <= {"int32", "int64", "bool"}
    assert (
        "float"
        not in jax.jit(lambda a, m: requantize(a, m, rule=rule)).lower(acc, quantize_multiplier(scale)).as_text()
    )


def test_a_symbolic_batch_exports():
    acc, scale, _ = layer(5)
    m = quantize_multiplier(scale)
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(lambda a: requantize(a, m)))(jax.ShapeDtypeStruct((batch, 16), jnp.int32))
    assert np.array_equal(np.asarray(exported.call(acc)), np.asarray(requantize(acc, m)))


# ------------------------------------------------------------------------------------ what the rules claim


def test_ruy_is_single_rounding_where_its_shift_does_not_wrap():
    rng = np.random.default_rng(2)
    shift = rng.integers(-31, 8, 100_000).astype(np.int32)
    m = Multiplier(rng.integers(2**30, 2**31, shift.size).astype(np.int32), shift)
    acc = (rng.integers(-(2**31), 2**31, shift.size) >> np.where(shift < 0, 0, shift + 1)).astype(np.int32)
    ruy, single = (np.asarray(requantize(acc, m, rule=r, **INT32)) for r in ("ruy", "single_round"))
    assert np.array_equal(ruy, single)
    # where acc << 1 wraps, the two part
    edge = np.array([2**30], np.int32)
    assert requantize(edge, multiplier(2**30, 0), rule="ruy", **INT32).tolist() == [-(2**29)]
    assert requantize(edge, multiplier(2**30, 0), rule="single_round", **INT32).tolist() == [2**29]


def test_the_rules_differ_by_at_most_one_and_only_as_documented():
    rng = np.random.default_rng(3)
    n = 400_000
    acc = rng.integers(-(2**20), 2**20, n).astype(np.int32)
    for shift in (-3, -6):
        m = Multiplier(rng.integers(2**30, 2**31, n).astype(np.int32), np.full(n, shift, np.int32))
        y = {r: np.asarray(requantize(acc, m, rule=r, **INT32)).astype(np.int64) for r in RULES}
        for rule in RULES:
            assert np.abs(y[rule] - y["nearest_even"]).max() <= 1
        # P(double != single) = 2^-(r+1): five standard deviations, fixed seed
        p, count = 2.0 ** (shift - 1), int((y["double_round"] != y["single_round"]).sum())
        assert (count - n * p) ** 2 < 25 * n * p


def test_rules_on_ties():
    acc, half = np.array([-3, -1, 1, 3, 5], np.int32), multiplier(2**30, 0)
    ties = {r: requantize(acc, half, rule=r).tolist() for r in RULES}
    assert ties["nearest_even"] == [-2, 0, 0, 2, 2]
    assert ties["nearest_away"] == [-2, -1, 1, 2, 3]
    assert ties["single_round"] == ties["neon"] == ties["double_round"] == ties["ruy"] == [-1, 0, 1, 2, 3]
    # in the right shift gemmlowp's ties go away from zero, NEON's go up
    quarter = multiplier(2**30, -1)
    acc = np.array([-6, -2, 2, 6], np.int32)
    assert requantize(acc, quarter, rule="double_round").tolist() == [-2, -1, 1, 2]
    assert requantize(acc, quarter, rule="neon").tolist() == [-1, 0, 1, 2]


def test_stochastic_is_unbiased_keyed_and_exact_on_integers():
    key, n = jax.random.key(5), 2**17
    acc = np.full(n, 11, np.int32)
    y = np.asarray(requantize(acc, 0.25, rule="stochastic", key=key))
    assert set(y.tolist()) == {2, 3}
    assert ((y == 3).sum() - 0.75 * n) ** 2 < 25 * n * 0.75 * 0.25
    assert np.array_equal(y, jax.jit(lambda a, k: requantize(a, 0.25, rule="stochastic", key=k))(acc, key))
    assert np.array_equal(requantize(acc * 4, 0.25, rule="stochastic", key=key), acc)
    keys = jax.random.split(key, 3)
    mapped = jax.vmap(lambda k: requantize(acc, 0.25, rule="stochastic", key=k))(keys)
    assert np.array_equal(mapped[1], requantize(acc, 0.25, rule="stochastic", key=keys[1]))


# ------------------------------------------------------------------------------------ registry and errors


def test_registry():
    assert set(RULES) | {"stochastic"} <= set(rule_names())
    assert get_rule("neon").name == "neon"
    assert all(get_rule(r).apply.__doc__ for r in RULES)
    with pytest.raises(ValueError, match=r"rule must be one of double_round, .*stochastic.*Got 'banker'"):
        requantize(np.zeros(1, np.int32), 1.0, rule="banker")
    with pytest.raises(ValueError, match="'neon' exists already"):
        register_rule(get_rule("neon"))


def test_a_rule_may_have_constants_of_its_own(monkeypatch):
    class Exponent(tuple):
        __slots__ = ()

    jax.tree_util.register_pytree_node(Exponent, lambda e: (tuple(e), None), lambda _, c: Exponent(c))
    rule = Rule("shift_only", lambda e: Exponent([-(e.exponent + 52)]), Exponent, lambda a, e, call: a >> e[0])
    monkeypatch.setitem(registry._RULES, rule.name, rule)
    acc = np.array([[-9, 100]], np.int32)
    constants = rule.prepare(Real.of(np.array([0.5, 0.125], np.float32)))
    assert constants[0].tolist() == [1, 3]
    with pytest.raises(TypeError, match=r"'neon' takes a scale or constants of type Multiplier. Got Exponent"):
        requantize(acc, constants, rule="neon")
    for scale in (constants, np.array([0.5, 0.125], np.float32)):
        assert requantize(acc, scale, rule="shift_only", zero_point=1).tolist() == [[-4, 13]]
        assert jax.jit(lambda a, s: requantize(a, s, rule="shift_only"))(acc, scale).tolist() == [[-5, 12]]
    with pytest.raises(TypeError, match=r"'shift_only' takes a scale or constants of type Exponent. Got Mult"):
        requantize(acc, quantize_multiplier(0.5), rule="shift_only")


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "acc must be an int32 array. Got int64", {"acc": np.zeros(2, np.int64)}),
        (TypeError, "acc must be an int32 array. Got float32", {"acc": np.zeros(2, np.float32)}),
        (
            ValueError,
            r"effective_scale must broadcast to the shape of acc, \(2,\)",
            {"e": np.array([1, 1, 1], np.float32)},
        ),
        (ValueError, r"Got shape \(1, 2\)", {"e": np.array([[1, 1]], np.float32)}),
        (ValueError, "zero_point must broadcast", {"zero_point": np.zeros(3, np.int32)}),
        (TypeError, "zero_point must be an int.*Got float", {"zero_point": 1.0}),
        (ValueError, "qmin <= qmax", {"qmin": 3, "qmax": 2}),
        (ValueError, "must fit int32.*a zero point is itself a code", {"qmin": -(2**31), "zero_point": 1}),
        (ValueError, "at least 0", {"e": -1.0}),
        (ValueError, "finite", {"e": np.nan}),
        (ValueError, r"below 2\^30", {"e": 2.0**40}),
        (
            ValueError,
            r"multiplier must be 0 or in \[2\^30, 2\^31\)",
            {"e": Multiplier(np.int32(7), np.int32(0))},
        ),
        (ValueError, "shifts from -32 to -32", {"e": Multiplier(np.int32(2**30), np.int32(-32))}),
        (TypeError, "multiplier must be int32. Got int64", {"e": Multiplier(np.int64(2**30), np.int32(0))}),
        (ValueError, "needs a random key", {"rule": "stochastic"}),
        (ValueError, "takes no key", {"key": 0}),
    ],
)
def test_errors(error, message, arguments):
    arguments = dict[str, Any]({"acc": np.zeros(2, np.int32), "e": 1.0} | arguments)
    if "key" in arguments:
        arguments["key"] = jax.random.key(0)
    with pytest.raises(error, match=message):
        requantize(arguments.pop("acc"), arguments.pop("e"), **arguments)


def test_a_traced_zero_point_needs_narrow_codes():
    acc = np.array([5], np.int32)
    f = jax.jit(lambda z: requantize(acc, 0.5, zero_point=z))
    assert f(np.int32(3)).tolist() == [5]
    with pytest.raises(ValueError, match="a traced zero_point needs codes within"):
        jax.jit(lambda z: requantize(acc, 0.5, zero_point=z, **INT32))(np.int32(3))
