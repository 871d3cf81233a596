"""`Dynamic(per="block")`: a scale for each run of activations, and weights in the block formats of GGUF files."""

import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime as ort
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, QSpec, Recipe, WeightFormat
from qjax.numerics.weight_formats import decode, encode
from qjax.ops.dynamic import DynamicProduct
from qjax.tracing import from_jaxpr
from tests.layers.dynamic_models import ASYMMETRIC, F32, Conv, normal
from tests.layers.test_dynamic import agree, reference_codes, reference_weight

X = normal(3, 7, 128) * np.exp(normal(3, 7, 1, seed=1))


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(128, 9, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


def reference(w: np.ndarray, setting: Dynamic) -> np.ndarray:
    """Terms of the smaller of blocks and groups, each rounded to float32 and added in their order."""
    block, spec = setting.block or 128, setting.weights or QSpec(bits=8, axis=-1)
    group = (spec.group_size if isinstance(spec, QSpec) else spec.group) or 128
    activations = setting.activations or QSpec(bits=8)
    total: Any = None
    for at in range(0, 128, min(block, group)):
        x_block, w_group = at // block * block, at // group * group
        x, s_x, _ = reference_codes(X[..., x_block : x_block + block], activations, (2,))
        x = x[..., at - x_block : at - x_block + min(block, group)]
        minimum = None
        if isinstance(spec, WeightFormat):
            parts = encode(jnp.asarray(w.T), spec)
            codes = np.asarray(parts[0], np.int64).T[at : at + min(block, group)]
            scale, *rest = (np.asarray(part)[:, w_group // group] for part in parts[1:])
            minimum = rest[0] if rest else None
        else:
            codes, scale = reference_weight(w[w_group : w_group + group], spec, (0,))
            codes = codes[at - w_group : at - w_group + min(block, group)]
        for sums, of_weight in ((x @ codes, scale), (x.sum(-1, keepdims=True), minimum)):
            if of_weight is not None:
                term = (sums.astype(F32) * (s_x * of_weight).astype(F32)).astype(F32)
                total = term if total is None else (total + term).astype(F32)
    return total


SETTINGS = {
    "int8": Dynamic(per="block", block=32),
    "smaller groups": Dynamic(per="block", block=64, weights=QSpec(bits=4, axis=-1, group_size=32)),
    "smaller blocks": Dynamic(
        per="block", block=16, activations=ASYMMETRIC, weights=QSpec(bits=4, axis=-1, group_size=64)
    ),
    "q4_0": Dynamic(per="block", block=32, weights=WeightFormat("q4_0")),
    "q4_1, asymmetric": Dynamic(per="block", block=32, activations=ASYMMETRIC, weights=WeightFormat("q4_1")),
    "q5_1, rows": Dynamic(per="row", weights=WeightFormat("q5_1")),
    "q8_0": Dynamic(per="block", block=64, weights=WeightFormat("q8_0")),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_products_are_those_of_the_formula(setting: Dynamic, tmp_path: Any) -> None:
    qmodel, graph = agree(Linear(), Recipe(overrides={"fc": setting}), X)
    kernel = np.asarray(qmodel.model.fc.kernel[...])
    np.testing.assert_array_equal(graph(X), reference(kernel, setting))
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, X))(qmodel, X), graph(X))
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(X), graph(X))


def test_sums_that_float32_cannot_hold_are_sums_of_integers() -> None:
    x, w = np.full((2, 2048), 3, F32), np.full((2048, 3), -5, F32)
    x[:, ::1024], w[1::1024] = 2.96, -4.97
    setting = Dynamic(per="block", block=1024, activations=ASYMMETRIC)
    (eqn,) = from_jaxpr(jax.make_jaxpr(lambda x, w: x @ w)(x, w)).equations
    product = DynamicProduct(eqn, 1, setting)
    coded = (*product.coding(jnp.asarray(x)), *product.weight_parts(jnp.asarray(w)))
    codes, scale, zero, kernel, of_weight, _ = (np.asarray(part) for part in coded)
    total: Any = None
    for block in range(2):
        at = slice(1024 * block, 1024 * (block + 1))
        sums = (codes[:, at].astype(np.int64) - zero[:, block : block + 1]) @ kernel[at].astype(np.int64)
        assert np.abs(sums).max() > 2**24
        term = (sums.astype(F32) * (scale[:, block : block + 1] * of_weight).astype(F32)).astype(F32)
        total = term if total is None else (total + term).astype(F32)
    np.testing.assert_array_equal(jax.jit(product.value)(*coded), total)


@pytest.mark.parametrize("name", ["q4_0", "q4_1"])
def test_gradients_are_those_of_the_dequantized_product(name: str) -> None:
    setting = Dynamic(per="block", block=32, weights=WeightFormat(name))
    qmodel: Any = qjax.quantize(Linear(), Recipe(overrides={"fc": setting}), X)
    kernel = qmodel.model.fc.kernel[...]
    dequantized = decode(encode(kernel.T, WeightFormat(name)), WeightFormat(name)).T
    along = jnp.sin(jnp.arange(9.0))
    grad_x = jax.grad(lambda x: jnp.sum(qmodel(x) @ along))(jnp.asarray(X))
    np.testing.assert_allclose(grad_x, np.broadcast_to(dequantized @ along, X.shape), rtol=1e-4, atol=1e-6)
    grads = nnx.grad(lambda m: jnp.sum(m(X)[..., 0]))(qmodel)["model"]["fc"]["kernel"][...]
    codes, scale, _ = reference_codes(X.reshape(3, 7, 4, 32), QSpec(bits=8), (3,))
    x = (codes * scale).reshape(21, 128)
    np.testing.assert_allclose(grads[:, 0], x.sum(0), rtol=1e-4, atol=1e-5)


def test_frozen_blocks_have_the_same_bits_and_train_beside_adapters() -> None:
    class Adapted(nnx.Module):
        def __init__(self) -> None:
            self.fc = nnx.LoRA(128, 2, 9, base_module=Linear().fc, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x)

    setting = Dynamic(per="block", block=32, weights=WeightFormat("q4_1"))
    qmodel: Any = qjax.quantize(Adapted(), Recipe(overrides={".*": qjax.FLOAT, "fc/base_module": setting}), X)
    before = nnx.jit(lambda m, x: m(x))(qmodel, X)
    base = qjax.training.freeze_base(qmodel, X)
    assert base.names == ("fc/base_module/kernel",)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(qmodel, X), before)
    # 20 bytes for each block of 32 weights
    stored = jax.tree.leaves(qmodel.model.fc.base_module.kernel.get_raw_value())
    assert sum(leaf.nbytes for leaf in stored) == 20 * 128 * 9 // 32
    grads = nnx.grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, nnx.LoRAParam))(qmodel)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_c_and_onnx_compute_the_same_bits(tmp_path: Any) -> None:
    setting = Dynamic(per="block", block=32, weights=WeightFormat("q4_1"))
    graph = qjax.convert(qjax.quantize(Linear(), Recipe(overrides={"fc": setting}), X), X)
    graph.emit("c", tmp_path, batch=3)
    subprocess.run(["make", "-C", tmp_path, "test"], check=True, capture_output=True)
    graph.emit("onnx", tmp_path / "model.onnx", style="integer")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_array_equal(found, graph(X))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"per": "block"}, 'per="block" needs the number of activations .* Write block=32'),
        ({"per": "block", "block": 0}, "a whole number of at least 1, got 0"),
        ({"per": "row", "block": 32}, "block=32 belongs to per=\"block\", got per='row'"),
    ],
)
def test_invalid_blocks(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamic(**kwargs)


def test_blocks_that_fit_no_product_are_refused() -> None:
    def quantize(setting: Dynamic, model: nnx.Module, x: np.ndarray) -> None:
        qjax.quantize(model, Recipe(overrides={".*": setting}), x)

    with pytest.raises(ValueError, match=r"blocks of 48 activations: .* size is a multiple .* \(128, 9\)"):
        quantize(Dynamic(per="block", block=48), Linear(), X)
    setting = Dynamic(per="block", block=3, weights=QSpec(bits=4, group_size=2))
    with pytest.raises(ValueError, match=r"blocks of 3 activations and groups of 2 weights: .* divides the other"):
        quantize(setting, nnx.Linear(6, 2, rngs=nnx.Rngs(0)), normal(2, 6))
    with pytest.raises(ValueError, match=r'per="block"\) on a convolution'):
        quantize(Dynamic(per="block", block=4), Conv(), normal(2, 6, 6, 4))
