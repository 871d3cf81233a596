"""Networks in the styles "qdq" and "qoperator": floats in and out, few transposes, fused kernels, files that change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx

import qjax
from conformance import cases
from conformance.single import graph_of
from qjax import targets
from qjax.contrib.importers import read_graph as read
from qjax.export.emit.onnx import to_model
from qjax.export.read_errors import ReadError
from qjax.graph.check import check_integer
from qjax.graph.ir import Tensor
from tests.export.emit.onnx_networks import (
    IMAGES,
    SEQUENCES,
    UNSIGNED,
    Attention,
    Images,
    Sequences,
    Shortcut,
    Small,
    converted,
)
from tests.export.emit.onnx_runs import checked, differing
from tests.export.emit.test_onnx_qdq import FLOATS, STYLES, facts_of, read_back, run
from tests.export.graphs import assert_equal

KERNELS = {"QLinearConv", "QGemm", "QLinearAdd", "QLinearMul", "QLinearAveragePool", "QLinearGlobalAveragePool"}


@pytest.fixture(scope="module")
def images() -> qjax.IntegerGraph:
    return converted(Images(), IMAGES, target="onnxruntime", activations=UNSIGNED)


def assert_runs(graph: qjax.IntegerGraph, sample: jax.Array, folder, *, functions: int = 0) -> list[str]:
    """Floats and codes, one row and many, in both styles; returns the operators that the optimizer made of "qdq"."""
    (port,) = graph.ir.inputs
    q = graph.ir.tensors[port].quantization
    assert q is not None
    x = jnp.concatenate([sample, sample * 3])
    codes = np.asarray(graph.quantize(x))
    noise = np.random.default_rng(0).integers(q.qmin, q.qmax + 1, codes.shape)
    codes = np.concatenate([codes, noise.astype(codes.dtype)])
    want = graph.run(codes)
    reals = graph.dequantize(want[: len(x)])
    found: dict[str, list[str]] = {}
    for style in STYLES:
        for feed, wanted, in_codes in ((x, reals, False), (codes, want, True)):
            model = checked(to_model(graph.ir, style=style, codes=in_codes))
            calls = [node.op_type for node in model.graph.node if node.domain == "qjax"]
            assert len(calls) == functions
            for size in (1, len(feed)):
                got, found[style] = run(model, {port: np.asarray(feed)[:size]}, folder)
                assert differing(got, [np.asarray(wanted)[:size]]) == 0
            assert_equal(read_back(model, folder), graph.ir)
    return found["qdq"]


@pytest.mark.exhaustive
def test_images_are_kernels_of_codes_and_nothing_else(images, tmp_path):
    operators = assert_runs(images, IMAGES, tmp_path)
    assert set(operators) >= KERNELS
    assert not FLOATS & set(operators)
    model = to_model(images.ir)
    assert facts_of(model)["onnxruntime_session"] == {}
    assert [node.op_type for node in model.graph.node].count("Transpose") == 2, "at the input, and where it flattens"
    dims = model.graph.input[0].type.tensor_type
    assert (model.graph.input[0].name, dims.elem_type) == (images.ir.inputs[0], onnx.TensorProto.FLOAT)
    assert dims.shape.dim[0].dim_param == "batch"


@pytest.fixture(scope="module")
def small() -> qjax.IntegerGraph:
    return converted(Small(), IMAGES, target="onnxruntime")


@pytest.mark.exhaustive
def test_products_of_int8_activations_need_no_option_of_the_session(small, tmp_path):
    operators = assert_runs(small, IMAGES, tmp_path)
    assert {"QLinearConv", "QGemm"} <= set(operators)
    # additions of integers, between int8 and uint8
    assert not FLOATS - {"Add"} & set(operators)
    assert facts_of(to_model(small.ir))["onnxruntime_session"] == {}


BOUNDS = {"clamp_min": -20, "clamp_max": 31}


class Moved(nnx.Module):
    """Between products: a maximum, a function that has a table, and moves; beside them a sum, which takes int8."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.mixed, self.last = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(self.first(x), (2, 2), strides=(2, 2))
        x = nnx.gelu(self.second(x))
        y = jnp.swapaxes(x, 1, 2)[:, :, 1:]
        return self.last(self.mixed(y) + y)


def test_what_lies_between_products_stays_unsigned(tmp_path):
    graph = converted(Moved(), IMAGES, target="onnxruntime")
    assert_runs(graph, IMAGES, tmp_path)
    codes = to_model(graph.ir, style="qoperator", codes=True)
    operators = [node.op_type for node in codes.graph.node]
    kinds = {"MaxPool", "GatherElements", "Transpose", "Slice"}
    assert kinds <= set(operators)
    # at the input, at the result of the sum, and from the two operands of the sum
    casts = [node for node in codes.graph.node if node.op_type == "Cast"]
    assert sum(node.attribute[0].i == onnx.TensorProto.UINT8 for node in casts) == 2
    assert sum(node.attribute[0].i == onnx.TensorProto.INT8 for node in casts) <= 3
    bounds = {role: Tensor(role, (), "int32", None, np.asarray(n, np.int32)) for role, n in BOUNDS.items()}
    nodes = [
        dataclasses.replace(node, constants={**node.constants, **{role: role for role in bounds}})
        if node.op == "table"
        else node
        for node in graph.ir.nodes
    ]
    clamped = check_integer(graph.ir.replace(nodes=tuple(nodes), tensors={**graph.ir.tensors, **bounds}))
    assert_runs(qjax.IntegerGraph(clamped), IMAGES, tmp_path)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.sampled(1)
def test_steps_of_a_recurrent_layer_share_their_weights(style, tmp_path):
    layer = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (2, 3, 3))
    graph = converted(layer, x, target="onnxruntime")
    model = to_model(graph.ir, style=style, codes=True)
    shapes = [tuple(proto.dims) for proto in model.graph.initializer]
    assert shapes.count((3, 12)) == shapes.count((4, 12)) == 1
    assert_equal(read_back(model, tmp_path), graph.ir)
    codes = np.asarray(graph.quantize(x))
    (port,) = graph.ir.inputs
    (found,), _ = run(model, {port: codes}, tmp_path)
    assert np.array_equal(found, np.asarray(graph.run(codes)))
    again = to_model(graph.ir, style=style, codes=True)
    (entry,) = (entry for entry in again.metadata_props if entry.key == "qjax")
    entry.value = entry.value.replace('"document":"', '"document":"x')
    with pytest.raises(ReadError, match="is damaged"):
        read_back(again, tmp_path)


@pytest.mark.parametrize("activations", [UNSIGNED, qjax.QSpec(bits=8, symmetric=False)])
@pytest.mark.sampled(1)
def test_attention_is_kernels_of_codes_and_nothing_else(activations, tmp_path):
    graph = converted(Attention(), SEQUENCES, target="onnxruntime", activations=activations)
    operators = assert_runs(graph, SEQUENCES, tmp_path)
    assert operators.count("QLinearMatMul") == operators.count("QLinearSoftmax") == 2
    assert not FLOATS - {"Add"} & set(operators)
    # the factor 6^-1/2 of the scores is in the first scale
    (scores,) = (node for node in graph.ir.nodes if "factor" in node.attributes)
    assert scores.attributes["factor"] == float(np.float32(6**-0.5))


@pytest.mark.exhaustive
def test_a_factor_of_a_product_survives_a_change_of_target(tmp_path):
    """Also of a file, where the target's constants are all that is left of the model."""
    graph = converted(Attention(), SEQUENCES, target="onnxruntime")
    codes = np.asarray(graph.quantize(SEQUENCES))
    path = tmp_path / "model.onnx"
    path.write_bytes(to_model(graph.ir, style="qoperator").SerializeToString())
    for target in ("tosa", "tflite_micro", "onnxruntime_avx2"):
        want = graph.retarget(target)
        found = qjax.read(path).retarget(target)
        assert not any("factor" in node.attributes for node in found.ir.nodes) or target == "onnxruntime_avx2"
        if target != "tflite_micro":
            assert np.array_equal(found.run(codes), want.run(codes))
    assert np.array_equal(qjax.read(path).run(codes), graph.run(codes))


def test_a_learned_factor_is_one_exact_sum():
    """A parameter may become negative, which a scale must not. So `exact` and `convert` agree for every value."""

    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.factor = nnx.Param(jnp.float32(0.7))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.factor * jnp.einsum("bij,bkj->bik", x, x)

    model = Scaled()
    qmodel = qjax.quantize(model, qjax.Recipe(target="onnxruntime"), SEQUENCES)
    qjax.calibrate(qmodel, [SEQUENCES])
    for value in (0.7, -0.3):
        model.factor[...] = jnp.float32(value)
        graph = qjax.convert(qmodel, SEQUENCES)
        assert graph.ir.nodes[0].attributes["rounding"] == "nearest_even"
        assert np.array_equal(qjax.exact(qmodel, SEQUENCES)(qmodel, SEQUENCES), graph(SEQUENCES))


def test_sums_of_int8_activations_need_an_option_of_the_session():
    case = cases.elementwise("add", "int8")[2]
    graph = graph_of(case, targets.get("onnxruntime"))
    model = to_model(graph, codes=True)
    assert facts_of(model)["onnxruntime_session"] == {"session.qdqisint8allowed": "1"}
    assert "session.qdqisint8allowed=1 is needed" in model.doc_string
    assert facts_of(to_model(graph, codes=True, style="qoperator"))["onnxruntime_session"] == {}


@pytest.mark.exhaustive
def test_padded_channels_survive_the_move_to_channels_last(tmp_path):
    """Optimized, ONNX Runtime 1.31.1 refuses to run a `Pad` of some axes between convolutions, or pads other ones."""
    graph = converted(Shortcut(), IMAGES, target="onnxruntime")
    operators = assert_runs(graph, IMAGES, tmp_path)
    assert {"QLinearConv", "Pad", "QLinearAdd"} <= set(operators)


@pytest.mark.exhaustive
def test_products_of_activations(tmp_path):
    graph = converted(Sequences(), SEQUENCES, target="onnxruntime", activations=UNSIGNED)
    operators = assert_runs(graph, SEQUENCES, tmp_path)
    assert {"QLinearMatMul", "QGemm", "Sub"} <= set(operators)
    assert not FLOATS & set(operators)


@pytest.mark.exhaustive
def test_codes_of_four_bits_take_four_bits(tmp_path):
    four = qjax.QSpec(bits=4, symmetric=False)
    # so small that no pair of products can leave int16
    for activations, moves in ((UNSIGNED, set[str]()), (four, {"Cast", "Add"})):
        graph = converted(
            Small(), IMAGES, target="onnxruntime", weights=qjax.QSpec(bits=4, axis=-1), activations=activations
        )
        operators = assert_runs(graph, IMAGES, tmp_path)
        assert {"QLinearConv", "QGemm"} <= set(operators)
        assert not ({*FLOATS, "Cast"} - moves) & set(operators)
        kernels = {node.constants["kernel"] for node in graph.ir.nodes if "kernel" in node.constants}
        stored = {tensor.name: tensor.data_type for tensor in to_model(graph.ir).graph.initializer}
        assert {stored[name] for name in kernels} == {onnx.TensorProto.INT4}


@pytest.mark.exhaustive
def test_another_rounding_of_the_same_network(small, tmp_path):
    saturating = small.retarget("onnxruntime_avx2")
    for style in STYLES:
        model = checked(to_model(saturating.ir, style=style))
        assert_equal(read_back(model, tmp_path), saturating.ir)
    model = to_model(small.ir)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert_equal(read(path, target="tflite_micro"), small.retarget("tflite_micro").ir)


def test_a_file_that_was_changed_is_what_its_operators_compute(small, tmp_path):
    """Also with nothing left of what qjax wrote beside the operators."""
    (port,) = small.ir.inputs
    codes = np.asarray(small.quantize(IMAGES))
    want = np.asarray(small.run(codes))
    for style in STYLES:
        bare = to_model(small.ir, style=style)
        del bare.metadata_props[:]
        for constant in bare.graph.initializer:
            del constant.metadata_props[:]
        found = read_back(bare, tmp_path)
        assert found.target == "onnxruntime"
        assert differing([np.asarray(qjax.IntegerGraph(found).run(codes))], [want]) == 0
    changed = to_model(small.ir, codes=True)
    bias = next(node.constants["bias"] for node in small.ir.nodes[::-1] if "bias" in node.constants)
    (stored,) = (tensor for tensor in changed.graph.initializer if tensor.name == bias)
    stored.raw_data = (np.frombuffer(stored.raw_data, np.int32) + 4000).astype(np.int32).tobytes()
    got, _ = run(changed, {port: codes}, tmp_path)
    again = read_back(changed, tmp_path)
    assert differing([np.asarray(qjax.IntegerGraph(again).run(codes))], got) == 0
    assert differing(got, [want]) > 0
    changed.graph.node[0].doc_string = "another tool was here"
    with pytest.raises(ReadError, match=r"something changed the file .* metadata=False"):
        read_back(changed, tmp_path)
    alone = read(tmp_path / "model.onnx", metadata=False)
    assert differing([np.asarray(qjax.IntegerGraph(alone).run(codes))], got) == 0


class Weighing(nnx.Module):
    """Rows of values weighed by probabilities, the values first or last, in several orders of their axes."""

    def __init__(self, subscripts: str) -> None:
        self.subscripts = subscripts
        self.score = nnx.Linear(6, 24, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        values = self.score(x).reshape(batch, length, 3, 8)
        shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", values, values))
        operands = (values, shares) if self.subscripts.startswith("bkhd") else (shares, values)
        return jnp.einsum(self.subscripts, *operands)


@pytest.mark.parametrize("subscripts", ["bkhd,bhqk->bqhd", "bhqk,bkhd->bqhd", "bkhd,bhqk->bhdq", "bhqk,bkhd->bhqd"])
@pytest.mark.sampled(1)
def test_products_of_activations_move_the_fewer_codes(subscripts, tmp_path):
    x = jax.random.normal(jax.random.key(0), (2, 5, 6))
    graph = converted(Weighing(subscripts), x, target="onnxruntime")
    codes = np.asarray(graph.quantize(x))
    for style in STYLES:
        model = checked(to_model(graph.ir, style=style, codes=True))
        got, _ = run(model, {graph.ir.inputs[0]: codes}, tmp_path)
        assert differing(got, [np.asarray(graph.run(codes))]) == 0
        assert_equal(read_back(model, tmp_path), graph.ir)
        moved = {node.input[0] for node in model.graph.node if node.op_type == "Transpose"}
        assert not any(name.startswith("softmax") for name in moved)
