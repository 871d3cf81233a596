"""The interpreter: integers only, the same bits under every transformation, flag, batch size and version of jax."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import targets
from qjax.assign import assign
from qjax.export.integer_graph import IntegerGraph
from qjax.run.interpreter import Interpreter
from tests.export.graphs import differences
from tests.lower.lowered import residual_network

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 6, 6, 3)).astype(np.float32)


class Residual(nnx.Module):
    """Convolution, depthwise convolution, batch norm, residual sum, pooling, dense."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem, self.bn = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.depth = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn(self.stem(x)))
        x = nnx.relu(x + self.depth(x))
        x = nnx.max_pool(x, (2, 2), (2, 2), "VALID")
        return self.head(x.mean(axis=(1, 2)))


class Attention(nnx.Module):
    """Two inputs and a dict of outputs: embedding, products of activations, a gate, concatenation."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(11, 4, rngs=rngs)
        self.query = nnx.Einsum("btd,dhe->bhte", (4, 2, 3), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, ids: jax.Array, x: jax.Array) -> dict[str, Any]:
        rows = self.embed(ids)
        query = self.query(rows)
        scores = jnp.einsum("bhte,bhse->bhts", query, query)
        return {"scores": scores, "y": (self.head(jnp.concatenate([rows * x, x], axis=-1)),)}


def converted(model: nnx.Module, sample: Any) -> tuple[qjax.QuantizedModel, IntegerGraph]:
    qmodel = qjax.quantize(model, qjax.Recipe(), sample)
    return qmodel, qjax.convert(qmodel, sample)


@pytest.fixture(scope="module")
def residual():
    return converted(Residual(), IMAGES)


@pytest.fixture(scope="module")
def attention():
    ids = RNG.integers(0, 11, (4, 5)).astype(np.int32)
    return converted(Attention(), (ids, RNG.normal(size=(4, 5, 4)).astype(np.float32)))


def codes_for(graph: IntegerGraph, batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(batch)
    found = []
    for name in graph.ir.inputs:
        tensor = graph.ir.tensors[name]
        q, shape = tensor.quantization, [batch if n is None else n for n in tensor.shape]
        low, high = (q.qmin, q.qmax + 1) if q else (0, 11)
        found.append(rng.integers(low, high, shape).astype(tensor.dtype))
    return found


def run(graph: IntegerGraph, *codes: Any) -> list[np.ndarray]:
    return [np.asarray(y) for y in jax.tree.leaves(graph.run(*codes))]


# ---------------------------------------------------------------------------- integers only


def avals(jaxpr: Any) -> Iterator[Any]:
    """The abstract value of everything in a jaxpr: arguments, literals, constants, results, inner jaxprs."""
    for var in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars):
        yield var.aval
    for eqn in jaxpr.eqns:
        for var in (*eqn.invars, *eqn.outvars):
            yield var.aval
        for param in jax.tree.leaves(dict(eqn.params), is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from avals(inner)


def hand_made() -> IntegerGraph:
    return IntegerGraph(assign(residual_network(), targets.get("double_round")))


@pytest.mark.parametrize("name", ["residual", "attention", "hand made"])
def test_no_float_between_the_quantizer_and_the_dequantizer(name, request):
    graph = hand_made() if name == "hand made" else request.getfixturevalue(name)[1]
    closed = graph.jaxpr(3)
    found = list(avals(closed.jaxpr))
    assert len(found) > 50
    kinds = {np.dtype(aval.dtype).kind for aval in found}
    assert kinds <= set("iub")
    assert all(np.asarray(const).dtype.kind in "iub" for const in closed.consts)
    lowered = jax.jit(graph.interpreter.outputs).lower(graph.interpreter.constants, codes_for(graph, 3))
    text = lowered.as_text()
    assert re.findall(r"[<x ](bf16|f8\w*|f16|f32|f64)\b", text) == []
    assert re.search(r"tensor<3x[0-9x]*xi(8|16|32)>|tensor<3x[0-9x]*xui8>", text)


def test_the_walk_finds_floats():
    # The oracle must itself be able to fail: a float three calls deep.
    inner = jax.jit(lambda x: jax.jit(lambda x: (x * 0.5).astype(jnp.int32))(x.astype(jnp.float32)))
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0])(jnp.int32(1))
    assert "f" in {np.dtype(aval.dtype).kind for aval in avals(closed.jaxpr)}


# ---------------------------------------------------------------------------- transformations and batches


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_jit_vmap_scan_and_batches(name, request):
    graph = request.getfixturevalue(name)[1]
    codes = codes_for(graph, 256)
    expected = run(graph, *codes)
    assert all(len(np.unique(y)) > 10 for y in expected)
    for size in (1, 3):
        for got, want in zip(run(graph, *(c[:size] for c in codes)), expected, strict=True):
            assert np.array_equal(got, want[:size])
    arrays = [jnp.asarray(c) for c in codes]

    def one(*example: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[0], graph.run(*(e[None] for e in example)))

    def step(carry: jax.Array, batch: Any) -> Any:
        return carry + 1, graph.run(*batch)

    @jax.jit
    def everywhere(*arrays: jax.Array) -> Any:
        scanned = lax.scan(step, jnp.int32(0), tuple(a.reshape(4, 64, *a.shape[1:]) for a in arrays))[1]
        flat = jax.tree.map(lambda y: y.reshape(256, *y.shape[2:]), scanned)
        return graph.run(*arrays), jax.vmap(one)(*arrays), flat

    for result in everywhere(*arrays):
        for got, want in zip(jax.tree.leaves(result), expected, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


@pytest.mark.exhaustive
def test_reals_in_reals_out(residual, attention):
    for (_, graph), shape in ((residual, (3, 6, 6, 3)), (attention, (3, 5, 4))):
        codes = codes_for(graph, 3)
        reals = [np.random.default_rng(1).normal(size=shape).astype(np.float32)]
        reals = reals if len(codes) == 1 else [codes[0], *reals]
        quantized = graph.quantize(*reals)
        quantized = quantized if isinstance(quantized, tuple) else (quantized,)
        outputs = graph.run(*quantized)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        parts, whole = graph.dequantize(*outputs), graph(*reals)
        assert jax.tree.structure(parts) == jax.tree.structure(whole)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True))
    assert set(whole) == {"scores", "y"}
    assert isinstance(whole["y"], tuple)


# ---------------------------------------------------------------------------- flags and versions


def test_the_users_64_bit_flag_changes_nothing(residual, attention):
    for qmodel, graph in (residual, attention):
        codes = codes_for(graph, 3)
        expected = run(graph, *codes)
        sample = IMAGES if len(codes) == 1 else (codes[0], np.ones((3, 5, 4), np.float32))
        reals = sample if isinstance(sample, tuple) else (sample,)
        whole = graph(*reals)
        with jax.enable_x64(True):
            wide = IntegerGraph(graph.ir)
            assert all(np.array_equal(a, b) for a, b in zip(run(wide, *codes), expected, strict=True))
            for a, b in zip(jax.tree.leaves(wide(*reals)), jax.tree.leaves(whole), strict=True):
                assert np.array_equal(a, b)
            again = qjax.convert(qmodel, sample)
        assert differences(again.ir, graph.ir) == []


HASHES = {
    "nearest_even": "0a26340ffc3548dd",
    "single_round": "1dfc2c2432eee469",
    "double_round": "8e88639e7a40032a",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", HASHES)
def test_the_same_bits_under_every_version_of_jax(target):
    # Constants from numpy's generator, folded, run, hashed: this suite runs under two versions of jax and of Python.
    graph = assign(residual_network(zero_point=100), targets.get(target))
    digest = hashlib.sha256()
    for tensor in sorted(graph.constants(), key=lambda t: t.name):
        digest.update(tensor.name.encode() + np.ascontiguousarray(tensor.value).tobytes())
    codes = np.random.default_rng(5).integers(-128, 128, (33, 6, 6, 4)).astype(np.int8)
    (y,) = Interpreter(graph)(codes)
    assert len(np.unique(np.asarray(y))) > 100
    digest.update(np.asarray(y).astype("<i2").tobytes())
    assert digest.hexdigest()[:16] == HASHES[target]


# ---------------------------------------------------------------------------- what it refuses


def test_inputs_that_the_graph_does_not_take(residual, attention):
    graph, two = residual[1], attention[1]
    name = graph.ir.inputs[0]
    (codes,) = codes_for(graph, 2)
    with pytest.raises(TypeError, match=rf"The graph takes 1 inputs \({name}\), got 2"):
        graph.run(codes, codes)
    with pytest.raises(TypeError, match=rf"The graph takes 1 inputs \({name}\), got 0"):
        graph()
    with pytest.raises(TypeError, match=r"The graph takes 2 inputs \(.*, .*\), got 1"):
        two.quantize(codes)
    with pytest.raises(TypeError, match=f"Input '{name}': expected codes of dtype int8, got float32. graph.quantize"):
        graph.run(codes.astype(np.float32))
    with pytest.raises(TypeError, match=f"Input '{name}': expected codes of dtype int8, got uint8"):
        graph.run(codes.astype(np.uint8))
    with pytest.raises(TypeError, match=f"Input '{name}': expected codes of dtype int8, got list"):
        graph.run([1, 2])
    for call in (graph.run, graph, graph.quantize):
        with pytest.raises(ValueError, match=rf"'{name}': expected shape \(batch, 6, 6, 3\), got \(2, 6, 6\)"):
            call(codes[..., 0])
        with pytest.raises(ValueError, match=rf"'{name}': expected shape \(batch, 6, 6, 3\), got \(2, 6, 6, 2\)"):
            call(codes[..., :2])
    ids, x = codes_for(two, 3)
    for call, values in ((two.run, x), (two, x.astype(np.float32))):
        with pytest.raises(ValueError, match=r"expected one batch size, got the sizes \[2, 3\]"):
            call(ids[:2], values)
    with pytest.raises(TypeError, match=f"Input '{two.ir.inputs[0]}': expected integers, got float32"):
        two(ids.astype(np.float32), x.astype(np.float32))
    with pytest.raises(TypeError, match=r"The graph has 2 outputs \(.*\), got 1"):
        two.dequantize(x)


def test_an_empty_batch(residual):
    graph = residual[1]
    (codes,) = codes_for(graph, 0)
    assert graph.run(codes).shape == (0, 5)
