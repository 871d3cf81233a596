"""Training with scales of activations that are found at run time (`qjax.Dynamic`): the gradient of their products."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import Dynamic, Recipe
from qjax.ops.dynamic import DynamicProduct
from qjax.ops.recomputed import recomputed
from qjax.tracing import from_jaxpr
from tests.layers.dynamic_models import ASYMMETRIC, F32, MLP, X, normal, product_of


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_the_gradient_goes_straight_through_both_quantizers(per: Any) -> None:
    rng = np.random.default_rng(11)
    # numbers that are their own codes, so that every sum is an integer and exact
    x, w, g = (rng.integers(-100, 101, shape).astype(F32) for shape in ((6, 8), (8, 5), (6, 5)))
    x[:, 0], w[0] = 127, 127
    product = product_of(lambda x, w: x @ w, x, w, Dynamic(per=per))

    def value(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w, *product.coding(x), *product.weight_parts(w))[0]

    y, pull = jax.vjp(value, x, w)
    dx, dw = pull(jnp.asarray(g))
    xi, wi, gi = (a.astype(np.int64) for a in (x, w, g))
    np.testing.assert_array_equal(y, xi @ wi)
    np.testing.assert_array_equal(dx, gi @ wi.T)
    np.testing.assert_array_equal(dw, xi.T @ gi)
    # what is multiplied in the derivative are the codes: a half of a step does not change them
    np.testing.assert_array_equal(jax.vjp(value, x + F32(0.25) * (np.abs(x) < 127), w)[1](jnp.asarray(g))[1], dw)


LINES = ("NHWC", "HWIO", "NHWC")

PRODUCTS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "dot": (lambda x, w: x @ w, (3, 6, 8), (8, 5)),
    "weight first": (lambda x, w: lax.dot_general(w, x, (((0,), (2,)), ((), ()))), (3, 6, 8), (8, 5)),
    "conv": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 1), [(1, 2), (0, 1)], dimension_numbers=LINES),
        (2, 6, 7, 16),
        (3, 2, 16, 32),
    ),
    "transposed conv": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), [(1, 2), (2, 1)], lhs_dilation=(2, 2), dimension_numbers=LINES
        ),
        (2, 4, 3, 4),
        (3, 3, 4, 5),
    ),
    "grouped conv": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "VALID", rhs_dilation=(2, 1), dimension_numbers=LINES, feature_group_count=2
        ),
        (2, 7, 6, 4),
        (3, 3, 2, 6),
    ),
    "depthwise conv": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=LINES, feature_group_count=4),
        (2, 7, 6, 4),
        (3, 3, 1, 8),
    ),
}


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.sampled(2)
def test_the_gradient_is_that_of_the_product_of_what_the_codes_stand_for(name: str, again: bool) -> None:
    function, x_shape, w_shape = PRODUCTS[name]
    rng = np.random.default_rng(13)
    # a range of 255 steps of size 1, none of them symmetric; weights that are their own codes
    x, w = (
        rng.integers(low, high, shape).astype(F32) for low, high, shape in ((-99, 155, x_shape), (-126, 127, w_shape))
    )
    x.flat[:2] = -100, 155
    w.reshape(-1, w_shape[-1])[0] = 127
    eqn = from_jaxpr(jax.make_jaxpr(function)(x, w)).equations[-1]
    product = DynamicProduct(eqn, 0 if name == "weight first" else 1, Dynamic(activations=ASYMMETRIC))
    assert product.coding(jnp.asarray(x))[1:] == [1, -28]
    g = rng.integers(-9, 10, eqn.out_shapes[0]).astype(F32)

    def pulled(function: Any) -> Any:
        y, pull = jax.vjp(jax.checkpoint(function) if again else function, x, w)
        return y, *pull(jnp.asarray(g))

    with recomputed() if again else contextlib.nullcontext():
        found = jax.jit(lambda: pulled(lambda x, w: product(x, w, *product.coding(x), *product.weight_parts(w))[0]))()
    for one, other in zip(found, pulled(function), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["dot", "depthwise conv"])
@pytest.mark.sampled(1)
def test_a_bfloat16_product_has_the_gradient_of_its_own_dtype(name: str) -> None:
    function, x_shape, w_shape = PRODUCTS[name]
    rng = np.random.default_rng(14)
    # their own codes, which bfloat16 holds
    x, w = (rng.integers(-126, 127, shape) for shape in (x_shape, w_shape))
    x.flat[0], w.reshape(-1, w_shape[-1])[0] = 127, 127
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    product = DynamicProduct(from_jaxpr(jax.make_jaxpr(function)(x, w)).equations[-1], 1, Dynamic())
    y, pull = jax.vjp(lambda x, w: product(x, w, *product.coding(x), *product.weight_parts(w))[0], x, w)
    assert y.dtype == jnp.bfloat16
    # the sums are exact, and rounded once
    np.testing.assert_array_equal(y, function(x.astype(F32), w.astype(F32)).astype(jnp.bfloat16))
    for place in (0, y.size // 2, y.size - 1):
        # one number, so that no sum depends on how bfloat16 is added
        g = jnp.zeros(y.size, jnp.bfloat16).at[place].set(-2).reshape(y.shape)
        for one, other in zip(pull(g), jax.vjp(function, x, w)[1](g), strict=True):
            assert one.dtype == jnp.bfloat16
            assert jnp.any(one != 0)
            np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_training_lowers_a_loss() -> None:
    model = qjax.quantize(MLP(), Recipe(overrides={".*": Dynamic(activations=ASYMMETRIC, per="row")}), X)
    y = normal(6, 4, seed=12)
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
