"""Additions and products of two tensors of codes as planes: the codes of the node for every pair, or none."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from conformance.single import graph_of as case_graph
from qjax import targets
from qjax.export.emit import elementwise_as_shift
from qjax.export.emit.c import to_files
from qjax.export.emit.onnx import to_model
from qjax.graph import kernels
from qjax.ops import formulas
from qjax.ops.formulas import Setting
from qjax.run.interpreter import Interpreter
from tests.export.emit import nodes

ELEMENTWISE = ("add", "subtract", "multiply")
BY_PLACE = {"tflite_add_neon", "tflite_multiply_neon", "torch_add", "torch_multiply", "torch_qnnpack_add_broadcast"}
"""Formulas whose runtime computes whole blocks of elements otherwise than the rest."""
NO_PLANE = {("tflite_micro", "multiply"), ("tflite_reference", "multiply"), ("cmsis_nn", "multiply")}
"""Two roundings, which send negative products another way."""


def of_case(target: str, label: str):
    own = targets.get(target)
    dtype = "uint8" if target.startswith(("torch", "onnx", "openvino")) else "int8"
    return case_graph(next(case for name, case in nodes.labelled(dtype, False, False) if name == label), own)


@pytest.mark.parametrize("target", targets.names())
@pytest.mark.parametrize("label", ["add", "multiply"])
@pytest.mark.sampled(7)
def test_a_plane_is_the_node(target, label):
    if (target, "int8", label) in nodes.REFUSED:
        return
    graph = of_case(target, label)
    (node,) = graph.nodes
    found = elementwise_as_shift.of_node(node.op, kernels.attributes(graph, node), kernels.constants_of(graph, node))
    by_place = node.attributes.get("formula") in BY_PLACE
    assert (found is None) == (by_place or (target, label) in NO_PLANE)
    if found is None:
        return
    a, b = (graph.tensors[name].dtype for name in graph.inputs)
    codes = [np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1) for dtype in (a, b)]
    pairs = [grid.reshape(-1) for grid in np.meshgrid(*codes, indexing="ij")]
    shape = tuple(n or 1 for n in graph.tensors[graph.inputs[0]].shape[1:])
    size = int(np.prod(shape))
    rows = [np.resize(x, (-(-x.size // size), *shape)).astype(dtype) for x, dtype in zip(pairs, (a, b), strict=True)]
    (want,) = Interpreter(graph)(*rows)
    assert np.array_equal(found.codes(*(x.astype(np.int64) for x in rows)), np.asarray(want))


def setting(op: str, rng: np.random.Generator, dtype: str) -> Setting:
    scales = tuple(np.float32(rng.uniform(0.01, 0.1)) for _ in range(2))
    zeros = tuple(np.int32(rng.integers(0, 100)) for _ in range(2))
    return Setting(op, scales, zeros, np.float32(rng.uniform(0.01, 0.1)), np.int32(3), dtype)


@pytest.mark.parametrize("name", [name for name in formulas.names() if formulas.get(name).ops & set(ELEMENTWISE)])
@pytest.mark.sampled(2)
def test_a_pointwise_formula_ignores_places_and_shapes(name):
    formula = formulas.get(name)
    rng = np.random.default_rng(0)
    for op in sorted(formula.ops & set(ELEMENTWISE)):
        found = setting(op, rng, "uint8" if name.startswith(("torch", "onnx", "openvino")) else "int8")
        constants = {**formula.prepare(found), "y_zero_point": found.y_zero_point}
        constants |= {f"zero_point{i}": z for i, z in enumerate(found.zero_points)}
        attributes = {"dtype": found.dtype, "qmin": -(2**15), "qmax": 2**15, "subtract": op == "subtract"}
        x, y = (jnp.asarray(rng.integers(-128, 128, 1031), jnp.int32) for _ in range(2))
        parts = [slice(0, 1031), slice(0, 1), slice(1, 8), slice(8, 41), slice(41, 105), slice(105, 1031)]
        results = [np.asarray(formula.kernel([x[part], y[part]], constants, attributes)) for part in parts]
        same = np.array_equal(results[0], np.concatenate(results[1:]))
        claimed = formula.is_pointwise(attributes, constants)
        # the optimised kernels have no vectorised difference
        assert claimed == (name not in BY_PLACE or op == "subtract")
        if claimed:
            assert same
            row = np.asarray(formula.kernel([x[:1020].reshape(60, 17), y[None, :17]], constants, attributes))
            copied = jnp.tile(y[:17], 60)
            assert np.array_equal(
                row.reshape(-1), np.asarray(formula.kernel([x[:1020], copied], constants, attributes))
            )
            boxes = np.asarray(formula.kernel([v[:1020].reshape(4, 15, 17) for v in (x, y)], constants, attributes))
            assert np.array_equal(boxes.reshape(-1), results[0][:1020])


@pytest.mark.parametrize(("name", "op"), [("xnnpack_add", "add"), ("xnnpack_multiply", "multiply")])
def test_scales_that_xnnpack_leaves_to_litert_are_by_place(name, op):
    formula = formulas.get(name)
    attributes = {"dtype": "int8", "input_dtypes": ["int8", "int8"], "subtract": False}
    for far, wanted in ((1.0, True), (2.0**-17, False)):
        s = [np.float32(0.1) * np.float32(far) if op == "add" else np.float32(far), np.float32(0.1)]
        found = Setting(op, tuple(s), (np.int32(0),) * 2, np.float32(0.1), np.int32(0), "int8")
        constants = formula.prepare(found)
        assert formula.is_pointwise(attributes, constants) == wanted
    # of 16 bits LiteRT's own kernels run, of which that of products has no vectors
    wide = {**attributes, "dtype": "int16", "input_dtypes": ["int16", "int16"]}
    assert formula.is_pointwise(wide, constants) == (op == "multiply")
    assert not formula.is_pointwise(attributes, {})


@pytest.mark.parametrize(("slopes", "offset"), [((0.3017, -0.6931), 0.1), ((1.0, 1.0), 0.5), ((0.0131, 2.0), -3.0)])
def test_fit_finds_a_plane_and_no_other_surface(slopes, offset):
    a = np.arange(-128, 128)
    height = slopes[0] * a[:, None] + slopes[1] * a + offset
    table = np.clip(np.floor(height), -128, 127).astype(np.int64)
    found = elementwise_as_shift.fit(table, a, a)
    assert found is not None
    assert np.array_equal(found.codes(a[:, None], a), table)
    table[17, 40] += 3
    assert elementwise_as_shift.fit(table, a, a) is None


def test_emitters_write_planes():
    graph = of_case("onnxruntime", "add")
    function = to_model(graph, style="integer").functions[-1]
    assert len(function.node) < 30
    text = to_files(graph, vectors=0)["model.c"]
    assert "float32" not in text.split("The formula")[0]
    assert "sar_i64(total" in text


class Sum(nnx.Module):
    def __call__(self, x):
        return x["a"] + x["b"]


def test_a_plane_lists_the_pairs_that_have_another_code():
    """Three of 65,536: two fused multiply-adds round twice."""
    rng = np.random.default_rng(9)
    x = {name: (rng.uniform(0.5, 3) * rng.normal(size=(64, 8))).astype(np.float32) for name in "ab"}
    graph = qjax.convert(qjax.quantize(Sum(), qjax.Recipe(target="onnxruntime"), x), x)
    (node,) = (node for node in graph.ir.nodes if node.op == "add")
    found = elementwise_as_shift.of_node(
        node.op, kernels.attributes(graph.ir, node), kernels.constants_of(graph.ir, node)
    )
    assert found is not None
    assert sorted(found.exceptions) == [(-75, -14, 1), (-43, 104, 1), (85, 32, -1)]
    pairs = np.stack(np.meshgrid(*(np.arange(-128, 128, dtype=np.int8),) * 2, indexing="ij")).reshape(2, -1, 8)
    want = np.asarray(graph.run(*pairs))
    assert np.array_equal(found.codes(*pairs.astype(np.int64)), want)
    assert np.array_equal(np.asarray(graph.native(len(want)).run(*pairs)), want)


def test_a_plane_has_few_exceptions():
    a = b = np.arange(-128, 128)
    plane = elementwise_as_shift.Plane((601, 377), 100, 10, -128, 127, -200, 200)
    table = plane.codes(a[:, None], b)
    # within 2^-10 of the next code
    pairs = np.argwhere(((601 * a[:, None] + 377 * b + 100) % 1024 == 1023) & (table < 100))
    chosen = pairs[:: len(pairs) // (elementwise_as_shift.MOST_EXCEPTIONS + 2)][
        : elementwise_as_shift.MOST_EXCEPTIONS + 1
    ]
    for i, j in chosen[:2]:
        table[i, j] += 1
    found = elementwise_as_shift.fit(table, a, b)
    assert found is not None
    assert 0 < len(found.exceptions) <= elementwise_as_shift.MOST_EXCEPTIONS
    assert np.array_equal(found.codes(a[:, None], b), table)
    spoiled = plane.codes(a[:, None], b)
    spoiled[chosen[:, 0], chosen[:, 1]] += 2
    assert elementwise_as_shift.fit(spoiled, a, b) is None
