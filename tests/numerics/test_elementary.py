"""Tables of elementwise functions: fractions, high-precision identities and float64 away from ties are the oracles."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from qjax.numerics.elementary import PRIMITIVES, Expression, evaluate, float32, series, table
from qjax.numerics.elementary.intervals import Steps

ONE, HALF, THREE, SIX, ZERO = ((float(v)).hex() for v in (1, 0.5, 3, 6, 0))
INT8 = (-128, 127)


def of(*steps: tuple, parameters: int = 0) -> Expression:
    return Expression(tuple((name, tuple(operands)) for name, *operands in steps), parameters)


def reals(scale: float, zero_point: int, codes: tuple[int, int] = INT8) -> np.ndarray:
    return (np.arange(codes[0], codes[1] + 1) - zero_point) * np.float64(scale)


RATIONAL: dict[str, tuple[Expression, Callable[[Fraction], Fraction]]] = {
    "abs": (of(("abs", 0)), abs),
    "square": (of(("square", 0)), lambda x: x * x),
    "product": (of(("mul", 0, 0)), lambda x: x * x),
    "cube": (of(("integer_pow", 0, THREE)), lambda x: x**3),
    "third": (of(("div", 0, THREE)), lambda x: x / 3),
    "leaky": (of(("ge", 0, ZERO), ("mul", 0, HALF), ("select", 1, 2, 0)), lambda x: x if x >= 0 else x / 2),
    "hard swish": (
        of(("add", 0, THREE), ("clamp", ZERO, 1, SIX), ("mul", 0, 2), ("div", 3, SIX)),
        lambda x: x * min(max(x + 3, Fraction(0)), Fraction(6)) / 6,
    ),
    "soft sign": (of(("abs", 0), ("add", 1, ONE), ("div", 0, 2)), lambda x: x / (abs(x) + 1)),
    "floor": (of(("floor", 0)), lambda x: Fraction(math.floor(x))),
    "ceil": (of(("ceil", 0)), lambda x: Fraction(math.ceil(x))),
    "round": (of(("round_even", 0)), lambda x: Fraction(round(x))),
    "round away": (
        of(("round_away", 0)),
        lambda x: Fraction(math.floor(abs(x) + Fraction(1, 2))) * (1 if x >= 0 else -1),
    ),
    "sign": (of(("sign", 0)), lambda x: Fraction((x > 0) - (x < 0))),
    "remainder": (of(("rem", 0, HALF)), lambda x: x - Fraction(1, 2) * int(x * 2)),
    "triangle": (of(("max", 0, ONE), ("min", 0, ONE), ("sub", 1, 2)), lambda x: abs(x - 1)),
    "inverse": (of(("square", 0), ("add", 1, ONE), ("integer_pow", 2, (-1.0).hex())), lambda x: 1 / (x * x + 1)),
}

SCALES = st.one_of(
    st.integers(-12, 3).map(lambda n: 2.0**n),
    st.floats(2.0**-13, 4.0, width=32),
)


@hypothesis.given(
    name=st.sampled_from(sorted(RATIONAL)),
    s_x=SCALES,
    s_y=SCALES,
    z_x=st.integers(*INT8),
    z_y=st.integers(*INT8),
)
@hypothesis.settings(max_examples=60)
def test_rational_functions_are_rounded_exactly(name, s_x, s_y, z_x, z_y):
    expression, function = RATIONAL[name]
    scale = Fraction(s_x)
    want = [min(max(round(function((q - z_x) * scale) / Fraction(s_y)) + z_y, -128), 127) for q in range(-128, 128)]
    assert table(expression, [], s_x, z_x, INT8, s_y, z_y, INT8).tolist() == want


@pytest.mark.parametrize("name", ["leaky", "hard swish", "abs"])
def test_ties_of_16_bits(name):
    expression, function = RATIONAL[name]
    found = table(expression, [], 2.0**-10, 5, (-32768, 32767), 2.0**-7, -3, INT8)
    picked = range(0, 65536, 97)
    want = [round(function(Fraction(i - 32768 - 5, 1024)) * 128) - 3 for i in picked]
    assert [found[i] for i in picked] == [min(max(w, -128), 127) for w in want]


def _domain(primitive: str) -> tuple[float, float]:
    if primitive in ("asin", "acos", "atanh"):
        return -1.0, 1.0
    if primitive in ("log", "sqrt", "rsqrt", "log1p"):
        return 0.0, 6.0
    return (1.0, 6.0) if primitive == "acosh" else (-6.0, 6.0)


TRUTH: dict[str, Callable[[float], float]] = {
    **{name: getattr(math, name) for name in "acos acosh asin asinh atan atanh cos cosh erf erfc exp".split()},  # noqa: SIM905
    **{name: getattr(math, name) for name in "cbrt exp2 expm1 log log1p sin sinh sqrt tan tanh".split()},  # noqa: SIM905
    "logistic": lambda x: 1 / (1 + math.exp(-x)),
    "rsqrt": lambda x: 1 / math.sqrt(x),
}


@pytest.mark.parametrize("primitive", sorted(TRUTH))
def test_functions(primitive, monkeypatch):
    low, high = _domain(primitive)
    expression, s_y = of((primitive, 0)), 0.01173
    # the range of codes within the domain
    s_x = np.float32((high - low) / 256)
    codes = (0, 255) if low == 0 else (-128, 127)
    zero_point = -int(1 / float(s_x)) - 130 if primitive == "acosh" else 0
    x = reals(float(s_x), zero_point, codes)
    found = table(expression, [], s_x, zero_point, codes, s_y, 3, (-1000, 1000))
    inside = (x > low) & (x < high)
    truth = np.array([TRUTH[primitive](v) / s_y for v in x[inside].tolist()])
    clear = np.abs(truth - np.floor(truth) - 0.5) > 1e-6
    assert clear.mean() > 0.9
    want = np.clip(np.rint(truth) + 3, -1000, 1000)
    assert np.array_equal(found[inside][clear], want[clear])
    # the same with every entry computed by the exact path
    run = Steps.run

    def doubtful(self, *args):
        self.unsure[:] = True
        return run(self, *args)

    monkeypatch.setattr(Steps, "run", doubtful)
    assert np.array_equal(table(expression, [], s_x, zero_point, codes, s_y, 3, (-1000, 1000)), found)


def test_65536_codes():
    silu, codes = of(("logistic", 0), ("mul", 0, 1)), (-32768, 32767)
    for expression, truth in (
        (silu, lambda x: x / (1 + np.exp(-x))),
        (of(("exp", 0)), np.exp),
    ):
        s_x, s_y = np.float32(2.7e-4), np.float32(2.1e-4)
        found = table(expression, [], s_x, -7, codes, s_y, 100, codes)
        real = truth(reals(float(s_x), -7, codes)) / float(s_y)
        clear = np.abs(real - np.floor(real) - 0.5) > 1e-6
        assert clear.mean() > 0.99
        assert np.array_equal(found[clear], np.clip(np.rint(real[clear]) + 100, *codes))


def test_digits():
    """Identities to 55 digits, for functions that have no library here."""
    with localcontext(series.context()):
        for value in ("0.001", "0.7", "3.3", "-2.25", "40.5", "12345.6"):
            x = Decimal(value)
            sine, cosine = series.sin_cos(x)
            assert abs(sine**2 + cosine**2 - 1) < Decimal("1e-58")
            double = series.sin_cos(2 * x)[0]
            assert abs(double - 2 * sine * cosine) < Decimal("1e-58")
            tangent = Decimal(value) / 7
            a = series.atan(tangent)
            sine, cosine = series.sin_cos(a)
            assert abs(sine - tangent * cosine) < Decimal("1e-55") * max(1, abs(tangent))
            assert abs(series.log1p(series.expm1(x / 100)) - x / 100) < Decimal("1e-55")
        assert str(series.pi(0)).startswith("3.14159265358979323846264338327950288419716939937510582097494")
        for value in ("0.01", "0.5", "1.5", "4"):
            # the alternating series of erf, with digits to spare
            x = Decimal(value)
            with localcontext(series.context(80)):
                terms = ((-1) ** n * x ** (2 * n + 1) / (math.factorial(n) * (2 * n + 1)) for n in range(160))
                want = 2 * sum(terms) / series.pi(80).sqrt()
            assert abs(series.erf(x) / want - 1) < Decimal("1e-55")
            assert abs(series.erfc(x) / (1 - want) - 1) < Decimal("1e-50")


def test_values_that_cancel_and_extremes():
    assert evaluate(of(("exp", 0), ("log", 1), ("sub", 1 + 1, 0)), 0.3) == 0
    # log(exp(x)) is x: its ties go to even
    identity = of(("exp", 0), ("log", 1))
    assert table(identity, [], 0.5, 0, (-4, 4), 1.0, 0, INT8).tolist() == [-2, -2, -1, 0, 0, 0, 1, 2, 2]
    assert evaluate(of(("exp", 0)), 1e9) == math.inf
    assert evaluate(of(("log", 0)), 0) == -math.inf
    assert evaluate(of(("div", ONE, 0)), 0) == math.inf
    assert math.isnan(evaluate(of(("div", 0, 0)), 0))
    assert evaluate(of(("sub", 0, 0), ("is_finite", 1)), 3) == 1
    assert evaluate(of(("pow", 0, HALF)), 9) == 3
    assert evaluate(of(("pow", 0, (1 / 3).hex())), 8) == 8.0 ** (1 / 3)
    assert evaluate(of(("cbrt", 0)), -27) == -3
    inverse = table(of(("div", ONE, 0)), [], 0.1, 0, (-2, 2), 0.1, 0, INT8).tolist()
    assert inverse == [-50, -100, 127, 100, 50]
    # what is not chosen may have no value
    guarded = of(("gt", 0, ZERO), ("log", 0), ("select", 1, ZERO, 2))
    assert table(guarded, [], 1.0, 0, (-2, 2), 0.1, 0, INT8).tolist() == [0, 0, 0, 0, 7]


def test_parameters_are_exact():
    slope = np.asarray([0.1], np.float32)
    prelu = of(("ge", 0, ZERO), ("mul", 0, 1), ("select", 2, 3, 0), parameters=1)
    found = table(prelu, [slope], 0.05, 0, INT8, 0.05, 0, INT8)
    want = [q if q >= 0 else round(q * Fraction(float(slope[0]))) for q in range(-128, 128)]
    assert found.tolist() == want


@pytest.mark.parametrize("primitive", sorted(set(TRUTH) | {"abs", "floor", "sign", "square", "round_even", "neg"}))
def test_in_float32_under_jax(primitive):
    low, high = _domain(primitive)
    x = np.linspace(max(low, 0.01 - abs(low)) + 0.01, high - 0.01, 33).astype(np.float32)
    got = jax.jit(lambda x: float32(of((primitive, 0), ("mul", 1, HALF)), x))(x)
    want = np.array([evaluate(of((primitive, 0), ("mul", 1, HALF)), float(v)) for v in x])
    assert got.dtype == np.float32
    units = np.abs(got - want) / np.spacing(np.abs(want.astype(np.float32)))
    assert units.max() <= (16 if primitive == "erfc" else 4), "XLA's float32 functions, in units in the last place"


def test_json():
    expression = of(("ge", 0, ZERO), ("mul", 0, 1), ("select", 2, 3, True), parameters=1)
    assert Expression.from_json(expression.to_json()) == expression
    assert of(("tanh", 0)).bare == "tanh"
    assert of(("mul", 0, ONE), ("tanh", 1)).bare is None
    assert PRIMITIVES["select"] == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"parameters": 0}, r"expected \[number of parameters, steps\]"),
        ([0, [["exp"]]], r"expected a list of \[primitive, \[operand, ...\]\]"),
        ([0, []], "expected 1 to 2000 steps. Got 0"),
        ([-1, [["exp", [0]]]], "expected 0 or more parameters"),
        ([0, [["system", [0]]]], "expected a primitive out of abs, .* Got 'system'"),
        ([0, [["exp", [0, 0]]]], "expected 1 operands"),
        ([0, [["exp", [1]]]], "the number of an earlier value"),
        ([0, [["exp", ["one"]]]], "a float as a hexadecimal string"),
        ([0, [["integer_pow", [0, (1e9).hex()]]]], "an integer power up to 256"),
    ],
)
def test_bad_expressions(value, message):
    with pytest.raises(ValueError, match=message):
        Expression.from_json(value)


def test_bad_tables():
    log, exp = of(("log", 0)), of(("exp", 0))
    with pytest.raises(ValueError, match=r"no value at -1\.28, the input's code -128 \(scale 0\.01, zero point 0\)"):
        table(log, [], 0.01, 0, INT8, 0.1, 0, INT8)
    with pytest.raises(ValueError, match=r"x_scale must be finite and positive. Got 0\.0"):
        table(exp, [], 0.0, 0, INT8, 0.1, 0, INT8)
    with pytest.raises(ValueError, match=r"x_range must hold 1 to 65536 codes\. Got 1 to 0"):
        table(exp, [], 0.1, 0, (1, 0), 0.1, 0, INT8)
    with pytest.raises(ValueError, match="expected 0 parameters, got 1"):
        table(exp, [1.0], 0.1, 0, INT8, 0.1, 0, INT8)
    with pytest.raises(ValueError, match="parameter 0 must be finite"):
        table(of(("mul", 0, 1), parameters=1), [math.inf], 0.1, 0, INT8, 0.1, 0, INT8)
