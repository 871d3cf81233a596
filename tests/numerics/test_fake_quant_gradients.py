"""The gradients of fake quantization: the papers' formulas, in fractions, without a tolerance.

Scales are powers of two, inputs multiples of an eighth of a scale and cotangents small integers, so that
every product and every sum is a float32 without rounding, whatever its order.
"""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.affine import QParams, QSpec, broadcast_to_tensor
from qjax.numerics.fake_quant import fake_quant, fake_quant_codes, lsq_gradient_scale

SPECS = {
    "tensor": QSpec(bits=4, symmetric=False),
    "channel": QSpec(bits=4, symmetric=False, axis=-1),
    "two axes": QSpec(bits=3, symmetric=False, signed=False, axis=(0, -1)),
    "groups": QSpec(bits=4, symmetric=False, axis=0, group_size=4, group_axis=1),
}
SHAPE = (3, 8, 5)


def case(spec: QSpec):
    rng = np.random.default_rng(0)
    shape = spec.param_shape(SHAPE)
    scale = np.ldexp(np.float32(1), rng.integers(-6, 3, shape)).astype(np.float32)
    zero_point = rng.integers(spec.qmin, spec.qmax + 1, shape).astype(np.float32)
    full = np.broadcast_to(np.asarray(broadcast_to_tensor(jnp.asarray(scale), spec, SHAPE)), SHAPE)
    x = (rng.integers(-150, 150, SHAPE) / 8).astype(np.float32) * full
    cotangent = rng.integers(-8, 9, SHAPE).astype(np.float32)
    return x, scale, zero_point, cotangent


def surrogate(point, frozen, spec: QSpec) -> Fraction:
    """The piecewise linear function whose derivative the straight-through estimator is.

    `frozen` is (x0, s0, z0): rounding is replaced by adding what it added there.
    """
    (x, scale, zero_point), (x0, s0, z0) = point, frozen
    added = round(x0 / s0) - x0 / s0
    if spec.qmin <= round(x0 / s0) + z0 <= spec.qmax:
        return (x / scale + added) * scale
    return ((spec.qmin if x0 < 0 else spec.qmax) - zero_point) * scale


@functools.cache
def differences(spec: QSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per element: dv/dx, dv/ds, dv/dz by finite differences of the surrogate, and where x clips above.

    The surrogate is linear in each argument near its point: a difference quotient in fractions is exact.
    """
    x, scale, zero_point, _ = case(spec)
    full = [
        np.broadcast_to(np.asarray(broadcast_to_tensor(jnp.asarray(p), spec, SHAPE)), SHAPE)
        for p in (scale, zero_point)
    ]
    results = [np.zeros(SHAPE) for _ in range(3)]
    above = np.zeros(SHAPE, bool)
    h = Fraction(1, 2**20)
    for index in np.ndindex(*SHAPE):
        at = tuple(Fraction(float(a[index])) for a in (x, *full))
        for which in range(3):
            up, down = ([v + sign * h * (k == which) for k, v in enumerate(at)] for sign in (1, -1))
            slope = (surrogate(up, at, spec) - surrogate(down, at, spec)) / (2 * h)
            results[which][index] = float(slope)
        above[index] = round(at[0] / at[1]) + at[2] > spec.qmax
    return results[0], results[1], results[2], above


def expected_gradients(gradient: str, gradient_scale: float, spec: QSpec):
    _, scale, _, cotangent = case(spec)
    dx, ds, dz, above = differences(spec)
    if gradient == "ste":
        ds, dz = ds * 0, dz * 0
    elif gradient == "pact":  # alpha = s * (qmax - z): the gradient comes from the clipped elements above only
        ds, dz = np.where(above, ds, 0), dz * 0

    def reduced(per_element):
        _, vjp = jax.vjp(lambda p: jnp.broadcast_to(broadcast_to_tensor(p, spec, SHAPE), SHAPE), jnp.asarray(scale))
        return np.asarray(vjp(jnp.asarray(cotangent * per_element * gradient_scale, jnp.float32))[0])

    return cotangent * dx, reduced(ds), reduced(dz)


WAYS = {
    "eager": [("reals", False)],
    "jit": [("reals", True), ("codes", True)],
    "checkpoint": [("checkpoint", True)],
    "alone": [],
    "eager codes": [("codes", False), ("checkpoint", False)],
}
CASES = [(s, g, f, w) for s in SPECS for g in ("ste", "lsq", "pact") for f in (1.0, 0.125) for w in WAYS]
# every value of each parameter once
DIAGONAL = [
    ("channel", "pact", 0.125, "eager"),
    ("groups", "lsq", 0.125, "jit"),
    ("two axes", "pact", 1.0, "checkpoint"),
    ("tensor", "lsq", 1.0, "alone"),
    ("tensor", "ste", 1.0, "eager codes"),
]


@pytest.mark.parametrize(
    ("name", "gradient", "gradient_scale", "ways"),
    [pytest.param(*case, marks=[] if case in DIAGONAL else pytest.mark.exhaustive) for case in CASES],
)
def test_gradients_are_the_papers(name, gradient, gradient_scale, ways):
    spec = SPECS[name]
    x, scale, zero_point, cotangent = case(spec)
    options = {"gradient": gradient, "gradient_scale": gradient_scale}
    expected = expected_gradients(gradient, gradient_scale, spec)

    def reals(x, scale, zero_point):
        return jnp.sum(cotangent * fake_quant(x, QParams(scale, zero_point, spec), **options))

    def codes(x, scale, zero_point):
        s, z = (broadcast_to_tensor(p, spec, SHAPE) for p in (scale, zero_point))
        c = fake_quant_codes(x, s, z, spec.qmin, spec.qmax, **options)
        return jnp.sum(cotangent * (c * jax.lax.stop_gradient(s)))

    for loss, jitted in WAYS[ways]:
        function = {"reals": reals, "codes": codes, "checkpoint": jax.checkpoint(codes)}[loss]
        run = jax.grad(function, (0, 1, 2))
        for mine, paper in zip((jax.jit(run) if jitted else run)(x, scale, zero_point), expected, strict=True):
            assert np.array_equal(np.asarray(mine), paper)
    if ways == "alone":
        # One at a time: what is frozen changes nothing.
        for which in range(3):
            alone = jax.jit(jax.grad(codes, which))(x, scale, zero_point)
            assert np.array_equal(np.asarray(alone), expected[which])


@pytest.mark.parametrize("gradient", ["ste", "lsq", "pact"])
def test_forward_mode_is_the_transpose_of_reverse_mode(gradient):
    spec = SPECS["channel"]
    x, scale, zero_point, cotangent = case(spec)

    def run(x, scale, zero_point):
        return fake_quant(x, QParams(scale, zero_point, spec), gradient=gradient)

    rng = np.random.default_rng(1)
    primals = (x, scale, zero_point)
    tangents = tuple(rng.integers(-4, 5, p.shape).astype(np.float32) for p in primals)
    _, forward = jax.jit(lambda p, t: jax.jvp(run, p, t))(primals, tangents)
    _, vjp = jax.vjp(run, *primals)
    backward = sum(float(np.sum(np.asarray(g) * t)) for g, t in zip(vjp(cotangent), tangents, strict=True))
    assert float(np.sum(np.asarray(forward) * cotangent)) == backward


def test_the_mask_is_on_the_rounded_value():
    """As torch's fake_quantize: up to half a step beyond the last code is inside; ties go to even codes."""
    x = jnp.array([7.49, 7.5, 7.51, -8.49, -8.5, -8.51], jnp.float32)
    qparams = QParams(1.0, 0, QSpec(bits=4, narrow_range=False))
    gradient = jax.grad(lambda x: fake_quant(x, qparams).sum())(x)
    assert np.asarray(gradient).tolist() == [1, 0, 0, 1, 1, 0]


def test_any_scale_agrees_with_the_formulas_in_float64():
    """Scales that are no powers of two: the float32 gradients differ from float64 ones by rounding only."""
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.01, 0.1, 16).astype(np.float32)
    steps = rng.integers(-12, 12, (512, 16)) + rng.uniform(-0.45, 0.45, (512, 16))
    x, g = (steps * scale).astype(np.float32), rng.normal(size=(512, 16)).astype(np.float32)
    spec = QSpec(bits=4, axis=-1)
    run = jax.jit(
        jax.grad(
            lambda x, s: jnp.sum(g * fake_quant(x, QParams(s, np.zeros(16, int), spec), gradient="lsq")),
            (0, 1),
        )
    )
    dx, ds = run(x, scale)
    ratio = x.astype(np.float64) / scale
    codes = np.clip(np.rint(ratio), -7, 7)
    inside = np.rint(ratio) == codes
    terms = g.astype(np.float64) * np.where(inside, codes - ratio, codes)
    assert np.array_equal(np.asarray(dx), np.where(inside, g, 0))
    # Per term: three roundings of numbers up to 12; then a sum of 512 of them.
    bound = (np.abs(g) * 12 * 3 * 2.0**-24).sum(0) + 512 * 2.0**-24 * np.abs(terms).sum(0)
    assert (np.abs(np.asarray(ds) - terms.sum(0)) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_inputs_get_16_bit_gradients_and_sums_in_float32(dtype):
    """3,000 gradients of 7 each: a bfloat16 or float16 sum would stop on the way to 21,000."""
    x = jnp.full((3000, 1), 9.0, dtype)
    qparams = QParams(np.array([1.0]), np.array([0]), QSpec(bits=4, axis=-1))

    def loss(x, scale):
        y = fake_quant(x, qparams.replace(scale=scale), gradient="lsq")
        return jnp.sum(y.astype(jnp.float32))

    dx, ds = jax.grad(loss, (0, 1))(x, qparams.scale)
    assert dx.dtype == dtype
    assert np.asarray(ds).tolist() == [21000.0]


def test_the_backward_pass_keeps_no_copy_of_the_input():
    x = jnp.ones((64, 64), jnp.float32)
    _, vjp = jax.vjp(lambda x, s: fake_quant(x, QParams(s, 0, QSpec()), gradient="lsq"), x, jnp.float32(0.5))
    big = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == x.shape]
    assert len(big) == 1
    assert np.array_equal(np.asarray(big[0]), np.asarray(x))


def test_a_frozen_scale_costs_no_reduction():
    x = jnp.ones((8, 8), jnp.float32)
    qparams = QParams(0.5, 0, QSpec())
    jaxpr = str(jax.make_jaxpr(lambda x, g: jax.vjp(lambda x: fake_quant(x, qparams, gradient="lsq"), x)[1](g))(x, x))
    assert "reduce_sum" not in jaxpr


@pytest.mark.parametrize("name", ["tensor", "channel"])
def test_an_elementwise_scale_takes_the_gradient_of_the_scale(name):
    spec = SPECS[name]
    x, scale, zero_point, cotangent = case(spec)
    scale, zero_point = (broadcast_to_tensor(jnp.asarray(p), spec, SHAPE) for p in (scale, zero_point))
    options = {"gradient": "lsq", "gradient_scale": 0.25}

    def codes(x, scale, zero_point, each=None):
        return fake_quant_codes(x, scale, zero_point, spec.qmin, spec.qmax, elementwise_scale=each, **options)

    plain, whole = jax.vjp(codes, x, scale, zero_point)
    ours, each = jax.vjp(codes, x, scale, zero_point, jnp.broadcast_to(scale, SHAPE))
    assert np.array_equal(plain, ours)
    dx, ds, dz, de = each(cotangent)
    assert np.array_equal(ds, jnp.zeros_like(ds))
    kept = np.broadcast_shapes(jnp.shape(scale))
    summed = tuple(axis for axis in range(3) if not kept or kept[axis] == 1)
    for one, other in zip((dx, jnp.sum(de, summed).reshape(kept), dz), whole(cotangent), strict=True):
        assert np.array_equal(one, other)
    assert np.abs(de).max() > 0
    with pytest.raises(ValueError, match=r"expected an elementwise_scale of x's shape, \(3, 8, 5\)\. Got \(3, 1, 1\)"):
        codes(x, scale, zero_point, jnp.ones((3, 1, 1)))


def test_vmap_of_grad_is_a_loop_of_grads():
    spec = SPECS["channel"]
    x, scale, zero_point, cotangent = case(spec)

    def gradients(x, g):
        _, vjp = jax.vjp(lambda x, s, z: fake_quant(x, QParams(s, z, spec), gradient="lsq"), x, scale, zero_point)
        return vjp(g)

    batched = jax.vmap(gradients)(x[:, None], cotangent[:, None])
    for i in range(SHAPE[0]):
        for many, one in zip(batched, gradients(x[i, None], cotangent[i, None]), strict=True):
            assert np.array_equal(np.asarray(many[i]), np.asarray(one))


def test_an_integer_zero_point_and_a_frozen_spec_train():
    """A quantizer with int32 zero point inside grad, jit and scan: the gradient reaches x and scale."""
    spec = QSpec(symmetric=False)
    x = jnp.linspace(-1.0, 1.0, 64)

    def loss(scale):
        def step(total, part):
            return total + fake_quant(part, QParams(scale, np.int32(4), spec), gradient="lsq").sum(), None

        return jax.lax.scan(step, jnp.float32(0), x.reshape(4, 16))[0]

    scanned = jax.jit(jax.grad(loss))(jnp.float32(0.0078125))
    whole = jax.grad(lambda s: fake_quant(x, QParams(s, np.int32(4), spec), gradient="lsq").sum())(
        jnp.float32(0.0078125)
    )
    assert np.isfinite(scanned)
    assert abs(float(scanned - whole)) <= 64 * 130 * 2.0**-24


def test_the_gradient_scale_of_lsq():
    assert lsq_gradient_scale(64, 1) == 0.125
    assert lsq_gradient_scale(1, 4) == 0.5
    with pytest.raises(ValueError, match=r"both arguments must be positive\. Got 0, 7"):
        lsq_gradient_scale(0, 7)


@pytest.mark.parametrize("spec", [QSpec(bits=8, symmetric=False), QSpec(bits=8, axis=-1), QSpec(bits=8, axis=0)])
@pytest.mark.parametrize("rows", [256, 257])
@pytest.mark.sampled(3)
def test_large_tensors_sum_in_parts(spec, rows):
    """A scale's gradient, summed over parts of the first axis; where that has none, or is kept, over all at once."""
    rng, shape = np.random.default_rng(1), (rows, 16, 17)
    scale = np.full(spec.param_shape(shape), 0.25, np.float32)
    zero_point = np.zeros(scale.shape, np.int32)
    x = (rng.integers(-400, 400, shape) / 16).astype(np.float32)
    cotangent = rng.integers(-4, 5, shape).astype(np.float32)

    def loss(x, scale):
        return jnp.sum(fake_quant(x, QParams(scale, zero_point, spec), gradient="lsq") * cotangent)

    dx, ds = jax.jit(jax.grad(loss, (0, 1)))(x, scale)
    steps = x.astype(np.float64) / 0.25
    codes = np.clip(np.rint(steps), spec.qmin, spec.qmax)
    inside = np.rint(steps) == codes
    slope = np.where(inside, codes - steps, codes) * cotangent
    kept = () if spec.axis is None else (spec.axis % 3,)
    summed = tuple(axis for axis in range(3) if axis not in kept)
    assert np.array_equal(dx, np.where(inside, cotangent, 0))
    # multiples of 1/4 below 2^22: exact in any order
    assert np.array_equal(np.asarray(ds).ravel(), slope.sum(axis=summed).ravel())
