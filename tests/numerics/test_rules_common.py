"""What holds for every rule: per channel, in every transform, host and trace alike, no float, named constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics import get_rule, register_family, requantize, rule_names
from qjax.numerics.rules import registry

# every deterministic rule, two members of each family
NAMES = [n for n in rule_names() if not get_rule(n).needs_key]
NAMES += ["nemo:256", "nemo:65536", "power_of_two:TRN:WRAP", "power_of_two:RND_ZERO:SAT_ZERO"]
FIELDS = {
    "float32_bias": ("mantissa", "exponent", "bias_mantissa", "bias_exponent"),
    "torch_fbgemm": ("mantissa", "exponent", "addend_mantissa", "addend_exponent", "step_mantissa", "step_exponent"),
    "torch_qnnpack": ("mantissa", "exponent", "bias_mantissa", "bias_exponent"),
    **dict.fromkeys(
        ("torch_onednn", "torch_onednn_conv", "openvino"),
        ("mantissa", "exponent", "addend_mantissa", "addend_exponent", "share_mantissa", "share_exponent"),
    ),
    "float64_away": ("mantissa_high", "mantissa_low", "exponent"),
}
CHANNELS = 6


def fields_of(name: str) -> tuple[str, ...]:
    if name in FIELDS:
        return FIELDS[name]
    if name.startswith("power_of_two"):
        return ("shift",)
    return ("mantissa", "exponent") if name.startswith("float32") else ("multiplier", "shift")


def layer(n: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accumulators (n, channels), powers of two as scales, which every rule takes, and zero points."""
    rng = np.random.default_rng(1)
    acc = rng.integers(-(2**14), 2**14, (n, CHANNELS)).astype(np.int32)
    return (
        acc,
        np.exp2(rng.integers(-8, -3, CHANNELS)).astype(np.float32),
        rng.integers(-5, 6, CHANNELS).astype(np.int32),
    )


def constants_of(name: str, scale: np.ndarray):
    """The rule's constants; one with a bias has one per channel."""
    rule = get_rule(name)
    if not rule.takes_bias:
        return rule.prepare(scale)
    return rule.prepare(scale, np.linspace(-900, 900, CHANNELS, dtype=np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_constants_are_named_int32(name):
    rule = get_rule(name)
    constants = constants_of(name, layer()[1])
    assert type(constants) is rule.constants
    assert rule.fields == constants._fields == fields_of(name)
    assert all(isinstance(v, np.ndarray) and v.dtype == np.int32 for v in constants)
    # a graph stores them by name
    again = rule.constants(**constants._asdict())
    assert all(np.array_equal(a, b) for a, b in zip(again, constants, strict=True))
    assert rule.check is not None
    rule.check(constants)
    with pytest.raises(TypeError, match=r"must be int32. Got float64"):
        rule.check(rule.constants(*(np.float64(1) for _ in rule.fields)))


@pytest.mark.parametrize("name", [n for n in NAMES if get_rule(n).takes_bias])
def test_a_rule_says_whether_it_rounds_its_bias(name):
    """A third of a step of the accumulator is lost in an integer; 4 steps of the output are one of the accumulator."""
    rule, scale = get_rule(name), np.ones(2, np.float32)
    of_scales = rule.of_scales or (lambda s_x, s_w, s_y, bias, per_channel: rule.prepare(s_x * s_w / s_y, bias))
    constants = of_scales(scale, scale, scale / 4, np.asarray([0, 1 / 3], np.float32), True)
    codes = np.asarray(requantize(np.full((1, 2), 5, np.int32), constants, rule=name))[0]
    assert codes.tolist() == {"integer": [20, 20], "real": [20, 21]}[rule.bias]


@pytest.mark.parametrize("name", [n for n in NAMES if get_rule(n).monotone])
@pytest.mark.sampled(5)
def test_a_monotone_rule_is_monotone_and_clamps_last(name):
    _, scale, zero_point = layer()
    scale = scale * np.float32(1 if name.startswith("power") else 0.83)
    constants = constants_of(name, scale)
    acc = np.sort(np.random.default_rng(2).integers(-(2**21), 2**21, (400, CHANNELS)), 0).astype(np.int32)
    raw, codes = (
        np.asarray(requantize(acc, constants, rule=name, zero_point=zero_point, qmin=low, qmax=high))
        for low, high in ((-(2**29), 2**29), (-128, 127))
    )
    assert np.all(np.diff(raw, axis=0) >= 0)
    assert np.array_equal(np.clip(raw, -128, 127), codes)


# two rules ask where on the accumulator a number stands; they have tests of their own
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("tflite_arm_gemm", "tflite_depthwise_neon")])
@pytest.mark.sampled(3)
def test_per_channel_in_every_transform(name):
    acc, scale, zero_point = layer()
    constants = constants_of(name, scale)
    columns = [
        requantize(acc[:, c], type(constants)(*(v[c] for v in constants)), rule=name, zero_point=int(zero_point[c]))
        for c in range(CHANNELS)
    ]
    want = np.stack([np.asarray(c) for c in columns], 1)
    assert len(np.unique(want)) > 20

    def f(a, s):
        return requantize(a, s, rule=name, zero_point=zero_point)

    results = {
        "eager": f(acc, constants),
        "jit": jax.jit(f)(acc, constants),
        "jit, constants": jax.jit(lambda a: f(a, constants))(acc),
        "jit, zero point": jax.jit(lambda a, z: requantize(a, constants, rule=name, zero_point=z))(acc, zero_point),
        "vmap over rows": jax.vmap(f, (0, None))(acc, constants),
        "vmap over channels": jax.vmap(lambda a, c, z: requantize(a, c, rule=name, zero_point=z), (1, 0, 0), 1)(
            acc, constants, zero_point
        ),
        "scan": jax.lax.scan(lambda c, a: (c, f(a, constants)), 0, acc)[1],
        "remat": jax.checkpoint(f)(acc, constants),
        "device arrays": f(jnp.asarray(acc), type(constants)(*(jnp.asarray(v) for v in constants))),
    }
    with jax.enable_x64(True):
        results["x64"] = jax.jit(f)(acc, constants)
    for transform, y in results.items():
        assert y.dtype == jnp.int32, transform
        assert np.array_equal(np.asarray(y), want), transform
    if not get_rule(name).takes_bias:
        for y in (f(acc, scale), jax.jit(f)(acc, scale)):
            assert np.array_equal(np.asarray(y), want)


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_agree_but_for_one_step(name):
    """Whatever the rounding: within one code of the real number, and clamped."""
    acc, scale, zero_point = layer(2000)
    got = np.asarray(requantize(acc, scale, rule=name, zero_point=zero_point), np.int64)
    exact = acc * scale.astype(np.float64) + zero_point
    inside = (exact > -127) & (exact < 126)
    assert inside.sum() > 1000
    assert np.abs(got - exact)[inside].max() <= 1
    assert got.min() >= -128
    assert got.max() <= 127


@pytest.mark.parametrize("name", NAMES)
def test_no_float_in_the_program(name):
    acc, scale, _ = layer(4)
    text = (
        jax.jit(lambda a, c: requantize(a, c, rule=name, zero_point=3)).lower(acc, constants_of(name, scale)).as_text()
    )
    assert not any(f in text for f in ("f16", "f32", "f64", "float"))


def test_families():
    with pytest.raises(ValueError, match=r"a family of rules named 'nemo' exists already"):
        register_family("nemo", ("nemo:D",), lambda name, parameters: get_rule("neon"))
    with pytest.raises(ValueError, match=r"rule must be one of .*, nemo:D, power_of_two:.*Got 'nemo'"):
        get_rule("nemo")
    assert set(registry._FAMILIES) == {"nemo", "power_of_two"}
