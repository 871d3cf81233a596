"""`qjax.Dynamic(per="example")`: what a batch gives is what each example gives alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import Dynamic, QSpec, Recipe
from qjax.runtimes.comparing import against_runtimes
from tests.layers.dynamic_models import ASYMMETRIC, F32, product_of

SPECS = {
    "symmetric": QSpec(bits=8),
    "int8": ASYMMETRIC,
    "uint8": QSpec(bits=8, symmetric=False, signed=False),
    "uint4": QSpec(bits=4, symmetric=False, signed=False),
}
GROUPS = {"dense": 1, "grouped": 2, "depthwise": 4}


class Network(nnx.Module):
    """Convolutions with padding, strides and dilation, and a dense layer on every place."""

    def __init__(self, groups: int) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(4, 8, (3, 3), padding="SAME", feature_group_count=groups, rngs=rngs)
        self.second = nnx.Conv(8, 6, (3, 2), strides=2, padding=((2, 1), (0, 2)), kernel_dilation=2, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def images() -> np.ndarray:
    """Examples of very different size, one of zeros."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 7, 6, 4)) * np.exp(3 * rng.normal(size=(5, 1, 1, 1)))).astype(F32)
    x[3] = 0
    return x


def quantized(spec: QSpec, per: Any, groups: int = 1) -> qjax.QuantizedModel:
    x = images()
    return qjax.quantize(Network(groups), Recipe(overrides={".*": Dynamic(activations=spec, per=per)}), x)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.exhaustive
def test_a_batch_is_its_examples_alone_with_one_scale_for_the_tensor(spec: QSpec, groups: int) -> None:
    x = images()
    qmodel = quantized(spec, "example", groups)
    graph, alone = qjax.convert(qmodel, x), qjax.convert(quantized(spec, "tensor", groups), x)
    y = np.asarray(graph(x))
    assert np.array_equal(y, np.concatenate([alone(x[i : i + 1]) for i in range(len(x))]))
    assert np.array_equal(y, nnx.jit(qjax.exact(qmodel, x))(qmodel, x))
    assert np.array_equal(y, qmodel(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_files_have_the_codes_of_the_graph(spec: QSpec) -> None:
    graph = qjax.convert(quantized(spec, "example"), images())
    codes = np.asarray(graph.quantize(images()))
    results = against_runtimes(graph, [[codes]], {"c": {}, "onnxruntime": {}})
    assert [result.differ for result in results] == [0, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["symmetric", "int8", "uint8"])
def test_gradients_are_those_of_the_examples_alone(name: str) -> None:
    rng, spec = np.random.default_rng(0), SPECS[name]
    # numbers that are codes times a power of two, so that every sum is exact in any order
    low, high = (spec.qmin, spec.qmax) if spec.symmetric else (-100, 155)
    x, w, g = (rng.integers(-8, 9, shape).astype(F32) for shape in ((3, 5, 5, 2), (3, 3, 2, 4), (3, 5, 5, 4)))
    x[:, 0, 0, 0], x[:, 0, 0, 1], w[0, 0] = low, high, 127
    x *= F32(2) ** np.array([-3, 0, 2], F32)[:, None, None, None]

    def conv(x: Any, w: Any) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pulled(x: Any, g: Any, per: Any) -> tuple[Any, Any, Any]:
        product = product_of(conv, x, w, Dynamic(activations=spec, per=per))

        def value(x: Any, w: Any) -> jax.Array:
            return product(x, w, *product.coding(x), *product.weight_parts(w))[0]

        y, pull = jax.vjp(value, jnp.asarray(x), jnp.asarray(w))
        return y, *pull(jnp.asarray(g))

    y, dx, dw = pulled(x, g, "example")
    each = [pulled(x[i : i + 1], g[i : i + 1], "tensor") for i in range(len(x))]
    assert np.array_equal(y, np.concatenate([one[0] for one in each]))
    assert np.array_equal(dx, np.concatenate([one[1] for one in each]))
    assert np.array_equal(dw, sum(np.asarray(one[2]) for one in each))
    # the numbers are their own codes, so nothing is rounded at all
    assert np.array_equal(y, conv(x, w))


def test_a_dense_layer_has_a_scale_for_all_rows_of_an_example() -> None:
    x = images()[:, :, 0]
    w = np.random.default_rng(1).normal(size=(4, 3)).astype(F32)
    found = product_of(lambda x, w: x @ w, x, w, Dynamic(per="example"))
    codes, scale, zero = found.coding(jnp.asarray(x))
    wanted = np.abs(x).max((1, 2)) / F32(127)
    assert np.array_equal(scale, np.where(wanted == 0, F32(1), wanted))
    assert codes.shape == x.shape
    assert not zero.any()


def test_examples_that_share_a_sum_are_refused() -> None:
    x, w = np.ones((4, 3), F32), np.ones((4, 2), F32)
    with pytest.raises(ValueError, match=r'per="example".*sums over the first axis.*per="row"'):
        product_of(lambda x, w: jnp.einsum("bi,bo->io", x, w), x, w, Dynamic(per="example"))
