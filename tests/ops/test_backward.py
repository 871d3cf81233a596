"""The two products of a backward pass on codes, beside JAX's own derivatives of the float product."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qjax.numerics import gradient_codes
from qjax.numerics.gradient_codes import Gradients, encode, fold
from qjax.ops import backward, dot
from qjax.ops.conv import Conv, halves_of

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")
WORDS = np.array([3, 5], np.uint32)
DOTS: list[Any] = [
    ((6, 5), (5, 4), (((1,), (0,)), ((), ()))),
    ((4, 5), (2, 6, 5), (((1,), (2,)), ((), ()))),
    ((2, 3, 6, 5), (2, 3, 7, 5), (((3,), (3,)), ((0, 1), (0, 1)))),
    ((6, 2, 5, 3), (3, 5, 2, 4), (((2, 3), (1, 0)), ((1,), (2,)))),
    ((6, 5), (5,), (((1,), (0,)), ((), ()))),
]
CONVOLUTIONS: list[Any] = [
    ((2, 9, 8, 3), (3, 2, 3, 5), {"window_strides": (2, 3), "padding": [(0, 2), (3, 0)], "rhs_dilation": (2, 1)}),
    ((2, 5, 6, 3), (3, 3, 3, 5), {"window_strides": (1, 1), "padding": [(1, 2), (2, 2)], "lhs_dilation": (2, 3)}),
    ((2, 9, 8, 3), (2, 2, 3, 5), {"window_strides": (3, 3), "padding": [(-1, 0), (0, -2)]}),
    ((2, 3, 9, 8), (5, 3, 3, 3), {"window_strides": (2, 2), "padding": "VALID", "dimension_numbers": NCHW}),
    ((2, 9, 3), (4, 3, 5), {"window_strides": (2,), "padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")}),
]  # fmt: skip


def codes(rng: Any, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape).astype(np.int8)


def in_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def check(product: Any, operands: tuple[np.ndarray, np.ndarray], halves: Any, rng: Any, zeros: tuple[int, int]) -> None:
    """Sums with and without a zero point, and where scales of both operands go; powers of two keep floats exact."""
    a, b = map(in_float, operands)
    y, _ = jax.vjp(product, a, b)
    g = codes(rng, *y.shape)
    for index, half in enumerate(halves):
        other = operands[1 - index]

        def derivative(x: np.ndarray, index: int = index) -> Any:
            shifted = (a, x) if index == 0 else (x, b)
            return jax.vjp(product, *shifted)[1]

        for zero in (None, zeros[1 - index]) if half.takes_zero else (None,):
            expected = derivative(in_float(other) - np.float32(zero or 0))(in_float(g))[index]
            given = None if zero is None else jnp.int32(zero)
            found = half.product(jnp.asarray(g), jnp.asarray(other), given)
            assert found.dtype == jnp.int32
            assert np.array_equal(found, expected)
        pairs = zip(half.summed, (g, other), strict=True)
        sizes = [[1 if i in axes else n for i, n in enumerate(x.shape)] for axes, x in pairs]
        of_g, of_other = (np.ldexp(np.float32(1), rng.integers(0, 3, size)).astype(np.float32) for size in sizes)
        scales = half.spread(jnp.asarray(of_g), jnp.asarray(of_other))
        found = half.product(jnp.asarray(g), jnp.asarray(other), None).astype(jnp.float32)
        found = found * jnp.broadcast_to(scales[0] * scales[1], found.shape)
        assert np.array_equal(found, derivative(in_float(other) * of_other)(in_float(g) * of_g)[index])


@pytest.mark.parametrize(("a", "b", "numbers"), DOTS)
def test_both_products_of_a_dot_are_those_of_its_derivative(a: Any, b: Any, numbers: Any) -> None:
    rng = np.random.default_rng(0)

    def product(x: Any, w: Any) -> jax.Array:
        return lax.dot_general(x, w, numbers, precision="highest", preferred_element_type=jnp.float32)

    halves = [dot.half_of(numbers, (len(a), len(b)), index) for index in (0, 1)]
    check(product, (codes(rng, *a), codes(rng, *b)), halves, rng, (5, -7))


@pytest.mark.parametrize(("x", "w", "given"), CONVOLUTIONS)
def test_both_products_of_a_convolution_are_those_of_its_derivative(x: Any, w: Any, given: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)

    def product(x: Any, w: Any) -> jax.Array:
        numbers = given.get("dimension_numbers", NHWC)
        own = {**given, "dimension_numbers": numbers, "precision": "highest", "preferred_element_type": jnp.float32}
        return lax.conv_general_dilated(x, w, **own)

    zeros = [jnp.zeros(shape, jnp.float32) for shape in (x, w)]
    equation: Any
    (equation,) = (e for e in jax.make_jaxpr(product)(*zeros).eqns if e.primitive.name == "conv_general_dilated")
    check(product, (codes(rng, *x), codes(rng, *w)), halves_of(Conv().attributes(equation), x, w), rng, (9, 0))


def multiply(how: Gradients, reach: Any = (127, 127), batch: int = 12) -> tuple[Any, ...]:
    """A dense layer of codes whose backward pass is in integers; its operands and a cotangent."""
    rng, numbers = np.random.default_rng(1), (((1,), (0,)), ((), ()))
    halves = dot.half_of(numbers, (2, 2), 0), dot.half_of(numbers, (2, 2), 1)

    def forward(a: jax.Array, b: jax.Array, *zeros: Any) -> Any:
        kept = [x if own is None else jnp.nan_to_num(x).astype(jnp.int8) for x, own in zip((a, b), reach, strict=True)]
        return jnp.dot(a, b, precision="highest"), (*kept, jnp.isnan(jnp.sum(a)))

    function = backward.differentiable(forward, halves, how, reach)
    a, b = in_float(codes(rng, batch, 6)), in_float(codes(rng, 6, 8))
    return function, a, b, rng.normal(size=(batch, 8)).astype(np.float32)


@pytest.mark.parametrize(
    "how",
    [
        Gradients(rounding="nearest"),
        Gradients(bits=4, rounding="nearest", per="row"),
        Gradients(bits=16, rounding="nearest", per="channel"),
        Gradients(bits=16),
    ],
)
def test_gradients_are_exact_integer_sums_with_one_scale(how: Gradients) -> None:
    """Python's integers sum the codes; one product with the scale in float32 follows."""
    function, a, b, g = multiply(how)
    words = jnp.asarray(WORDS) if how.stochastic else None
    found = jax.vjp(lambda a, b: function(a, b, words, None, None), a, b)[1](g)
    for index in (0, 1):
        own = (how.per, index) in (("row", 0), ("channel", 1))
        stream = None if words is None else fold(words, 0 if how.per == "tensor" else 1 + index)
        coded = encode(jnp.asarray(g), ((1,), (0,))[index] if own else (0, 1), how, stream)
        digits = [np.asarray(digit).astype(object) for digit in coded.digits]
        whole = digits[0] if len(digits) == 1 else digits[0] * 256 + digits[1]
        sums = whole @ b.T.astype(int).astype(object) if index == 0 else a.T.astype(int).astype(object) @ whole
        assert np.array_equal(found[index], sums.astype(np.float32) * np.asarray(coded.scale))


def test_blocks_have_scales_of_their_own_and_their_sums_are_added_in_float() -> None:
    how = Gradients(rounding="nearest", per="block", block=4)
    function, a, b, g = multiply(how)
    found = jax.vjp(lambda a, b: function(a, b, None, None, None), a, b)[1](g)[1]
    total = np.zeros_like(found)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 12)):
        coded = encode(jnp.asarray(g[rows]), (0,), how, None)
        total = total + (a[rows].T @ in_float(np.asarray(coded.digits[0]))) * np.asarray(coded.scale)
    assert np.array_equal(found, total)


def test_a_float_operand_is_quantized_along_the_summed_axis() -> None:
    how = Gradients(rounding="nearest")
    function, a, _, g = multiply(how, (127, None))
    b = np.random.default_rng(2).normal(size=(6, 8)).astype(np.float32)
    found = jax.vjp(lambda a, b: function(a, b, None, None, None), a, b)[1](g)[0]
    of_g, of_b = encode(jnp.asarray(g), (0, 1), how, None), encode(jnp.asarray(b), (1,), how, None)
    sums = np.asarray(of_g.digits[0]).astype(np.int64) @ np.asarray(of_b.digits[0]).astype(np.int64).T
    assert np.array_equal(found, sums.astype(np.float32) * (np.asarray(of_g.scale) * np.asarray(of_b.scale).T))


def test_sums_that_int32_cannot_hold_are_cut_into_pieces_and_none_wraps() -> None:
    """All codes are the largest ones, with a zero point that makes the activations 255."""
    how, rows = Gradients(rounding="nearest"), 70_000
    function, _, b, _ = multiply(how, (255, 127), 2)
    a, g = np.full((rows, 6), 255, np.float32), np.ones((rows, 8), np.float32)
    numbers = (((1,), (0,)), ((), ()))
    halves = dot.half_of(numbers, (2, 2), 0), dot.half_of(numbers, (2, 2), 1)

    def forward(a: jax.Array, b: jax.Array, zero: Any, _: Any) -> Any:
        kept = (a + zero.astype(jnp.float32)).astype(jnp.int8), b.astype(jnp.int8), jnp.array(False)
        return jnp.dot(a, b, precision="highest"), kept

    function = backward.differentiable(forward, halves, how, (255, 127))
    found = jax.vjp(lambda a, b: function(a, b, None, jnp.int32(-128), None), a, b)[1](g)[1]
    assert 255 * 127 * rows > 2**31
    np.testing.assert_allclose(found, np.full((6, 8), 255 * 127 * rows * (1 / 127)), rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    half = dot.half_of((((1,), (0,)), ((), ())), (2, 2), 1)
    long, short = (Gradients(rounding="nearest", per="block", block=block) for block in (10**6, 1))
    with pytest.raises(ValueError, match=r"up to 16129 .* at most 133144, .*\. Use a block of 133144 or less"):
        backward.pieces_of(half, (10**6, 8), (10**6, 6), long, 127 * 127)
    with pytest.raises(ValueError, match=r"at most 64, .*Use a longer block or a smaller batch"):
        backward.pieces_of(half, (100, 8), (100, 6), short, 127 * 127)
    batch: Any
    (batch,) = jax.export.symbolic_shape("batch")
    with pytest.raises(ValueError, match=r"the length of a sum must be known.*Export the step with a fixed batch"):
        backward.pieces_of(half, (batch, 8), (batch, 6), Gradients(), 127 * 127)


def test_stochastic_rounding_without_a_key_is_refused_where_it_would_round() -> None:
    function, a, b, _ = multiply(Gradients())
    assert np.array_equal(function(a, b, None, None, None), jnp.dot(a, b, precision="highest"))
    with pytest.raises(ValueError, match=r"this step has no key.*gradient_key"):
        jax.vjp(lambda a, b: function(a, b, None, None, None), a, b)


def test_forward_mode_is_an_error_of_jax() -> None:
    function, a, b, _ = multiply(Gradients(rounding="nearest"))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda a, b: function(a, b, None, None, None), (a, b), (a, b))


@pytest.mark.parametrize("place", ["cotangent", "operand"])
def test_a_nan_makes_the_gradients_nan(place: str) -> None:
    function, a, b, g = multiply(Gradients(rounding="nearest"))
    (g if place == "cotangent" else a)[1, 2] = np.nan
    for found in jax.vjp(lambda a, b: function(a, b, None, None, None), a, b)[1](g):
        assert np.isnan(found).all()


def test_every_product_draws_its_own_bits() -> None:
    words = [
        np.asarray(backward.Current(Gradients(), jnp.asarray(WORDS), path).own).tolist()
        for path in ((), *itertools.product(range(3), repeat=2))
    ]
    assert len({tuple(one) for one in words}) == len(words)
    assert gradient_codes.FRACTION == 16
