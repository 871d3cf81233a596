"""Networks as integer ONNX: free and fixed batches, few transposes, 4-bit weights, files, and files that lie."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx

import qjax
from qjax.assign.retarget import retarget
from qjax.contrib.importers.onnx import written_by_qjax
from qjax.export.emit.onnx import emit, to_model
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph
from tests.export.emit.onnx_runs import by_onnxruntime, by_reference, checked, differing
from tests.export.graphs import differences
from tests.layers.round_trip import data


class Network(nnx.Module):
    """A residual block, both kinds of pooling, a flattening head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.grouped = nnx.Conv(8, 8, (3, 3), feature_group_count=2, kernel_dilation=2, rngs=rngs)
        self.head = nnx.Linear(8 * 4, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        x = nnx.relu(x + self.grouped(self.depthwise(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, np.float32(0), jax.lax.add, window, window, "VALID") / np.float32(4)
        return self.head(x.reshape(x.shape[0], -1))


SAMPLE = data(4, 8, 8, 3)


@pytest.fixture(scope="module")
def graph() -> Graph:
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), first_last_bits=8)
    qmodel = qjax.quantize(Network(), recipe, SAMPLE)
    qjax.calibrate(qmodel, [SAMPLE])
    qmodel.eval()
    return qjax.convert(qmodel, SAMPLE).ir


@pytest.fixture(scope="module")
def model(graph: Graph) -> onnx.ModelProto:
    return checked(to_model(graph))


def assert_runs(graph: Graph, model: onnx.ModelProto, size: int) -> None:
    runner = qjax.IntegerGraph(graph)
    codes = np.asarray(runner.quantize(jnp.concatenate([SAMPLE, SAMPLE * 3])[:size]))
    want, feeds = [np.asarray(runner.run(codes))], {graph.inputs[0]: codes}
    for _, got in by_onnxruntime(model, feeds):
        assert differing(got, want) == 0
    assert differing(by_reference(model, feeds), want) == 0


@pytest.mark.sampled(1)
def test_the_batch_is_free(graph, model):
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for size in (1, 8):
        assert_runs(graph, model, size)


def test_one_node_of_the_model_per_node_of_the_graph_and_no_needless_transpose(graph, model):
    calls = [node for node in model.graph.node if node.domain == "qjax"]
    assert [node.name for node in calls] == [node.name for node in graph.nodes]
    assert [node.op_type for node in model.graph.node if node.domain != "qjax"] == ["Transpose"]
    inside = {f.name: [n.op_type for n in f.node].count("Transpose") for f in model.functions}
    assert {name: count for name, count in inside.items() if count} == {"reshape": 1}
    names = {value.name for value in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    assert {graph.inputs[0], *(node.output for node in graph.nodes)} <= names
    assert "one rounding" in next(f.doc_string for f in model.functions if f.name == "requantize_nearest_even").lower()


def test_codes_of_four_bits_take_four_bits(graph, model):
    kinds = {tensor.name: (tensor.data_type, len(tensor.raw_data)) for tensor in model.graph.initializer}
    kernels = {node.name: node.constants["kernel"] for node in graph.nodes if "kernel" in node.constants}
    assert kinds[kernels["depthwise"]] == (onnx.TensorProto.INT4, 8 * 9 // 2)
    assert kinds[kernels["stem"]] == (onnx.TensorProto.INT8, 3 * 3 * 3 * 8)


@pytest.mark.exhaustive
def test_it_reads_back_as_the_graph(graph, model):
    again = onnx.load_model_from_string(model.SerializeToString())
    assert written_by_qjax.style_of(again) == "integer"
    assert differences(written_by_qjax.read(again), graph) == []
    other = retarget(written_by_qjax.read(again), "tflite_micro")
    assert differences(other, retarget(graph, "tflite_micro")) == []


def test_a_place_in_the_tensor_needs_a_batch(graph):
    placed = retarget(graph, "tflite_optimized_x86")
    with pytest.raises(ValueError, match=r"Node 'add' \(add\): tflite_add_neon .* batch=1"):
        to_model(placed)
    fixed = checked(to_model(placed, batch=3))
    assert_runs(placed, fixed, 3)
    assert differences(written_by_qjax.read(fixed), placed) == []


def test_a_row_by_itself_is_not_like_the_others(graph):
    # one row of a matrix takes another kernel than two
    with pytest.raises(ValueError, match="fixed batch"):
        to_model(retarget(graph, "tflite_optimized_arm"))


def test_pairs_that_saturate_run_on_any_cpu():
    spec = qjax.QSpec(bits=8, signed=False, symmetric=False)
    recipe = qjax.Recipe(target="onnxruntime_avx2", activations=spec)
    qmodel = qjax.quantize(nnx.Linear(40, 6, rngs=nnx.Rngs(0)), recipe, data(4, 40))
    qjax.calibrate(qmodel, [data(4, 40)])
    qmodel.eval()
    graph = qjax.convert(qmodel, data(4, 40)).ir
    codes = np.random.default_rng(0).integers(128, 256, (9, 40)).astype(np.uint8)
    want = np.asarray(qjax.IntegerGraph(graph).run(codes))
    model = checked(to_model(graph, style="integer"))
    for _, got in by_onnxruntime(model, {graph.inputs[0]: codes}):
        assert differing(got, [want]) == 0
    assert differing(by_reference(model, {graph.inputs[0]: codes}), [want]) == 0


class Hashed(nnx.Module):
    """A row of a table by a hash of the ids: a sum that wraps."""

    def __init__(self) -> None:
        self.rows = nnx.Embed(3, 4, rngs=nnx.Rngs(0))

    def __call__(self, ids: jax.Array) -> jax.Array:
        found = jnp.sum(ids * jnp.int32(1000003), axis=1)
        return self.rows((found > 0).astype(jnp.int32) + (jnp.abs(found) > 2**28).astype(jnp.int32))


@pytest.mark.exhaustive
def test_a_sum_that_wraps():
    ids = np.random.default_rng(0).integers(0, 100_000, (16, 50)).astype(np.int32)
    qmodel = qjax.quantize(Hashed(), qjax.Recipe(), ids)
    qmodel.eval()
    graph = qjax.convert(qmodel, ids).ir
    want = np.asarray(qjax.IntegerGraph(graph).run(ids))
    model = checked(to_model(graph, style="integer"))
    for _, got in by_onnxruntime(model, {graph.inputs[0]: ids}):
        assert differing(got, [want]) == 0
    assert differing(by_reference(model, {graph.inputs[0]: ids}), [want]) == 0


def test_a_file_that_was_changed_is_refused(model):
    def changed(change) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        return copy

    def body(copy: onnx.ModelProto) -> None:
        function = next(f for f in copy.functions if f.name.startswith("requantize"))
        next(node for node in function.node if node.op_type == "Add").op_type = "Sub"

    def wire(copy: onnx.ModelProto) -> None:
        del copy.graph.node[0].input[:]

    def weights(copy: onnx.ModelProto) -> None:
        copy.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL

    with pytest.raises(ReadError, match=r"the function 'requantize_nearest_even.* is not what its rule becomes"):
        written_by_qjax.read(changed(body))
    for change in (wire, weights, lambda copy: copy.graph.node.pop(), lambda copy: copy.functions.pop()):
        with pytest.raises(ValueError):
            written_by_qjax.read(changed(change))
    assert written_by_qjax.style_of(onnx.ModelProto()) is None


def test_files_and_options(graph, model, tmp_path):
    path = tmp_path / "model.onnx"
    emit(graph, path)
    assert path.read_bytes() == model.SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match="style"):
        emit(graph, path, style="dense")
    for batch in (0, True, "1"):
        with pytest.raises(ValueError, match="batch of at least 1"):
            emit(graph, path, batch=batch)  # pyright: ignore[reportArgumentType]
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


class Small(nnx.Module):
    """A product of so few weights that its function holds their numbers, and reads no input for them."""

    def __init__(self, rank: int, features: tuple[int, int], groups: int = 1) -> None:
        window, rngs = (1,) * (rank - 2), nnx.Rngs(0)
        conv = nnx.Conv(*features, window or (1,), feature_group_count=groups, rngs=rngs)
        self.layer = conv if window else nnx.Linear(*features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("rank", "features", "groups"), [(2, (1, 1), 1), (4, (1, 1), 1), (4, (2, 2), 2), (2, (1, 2), 1)]
)
def test_weights_of_few_bits_that_no_function_reads(bits, rank, features, groups):
    sample = data(2, *(3,) * (rank - 2), features[0])
    recipe = qjax.Recipe(weights=qjax.QSpec(bits, axis=-1), activations=qjax.QSpec(16))
    qmodel = qjax.quantize(Small(rank, features, groups), recipe, sample)
    qjax.calibrate(qmodel, [sample])
    qmodel.eval()
    found = qjax.convert(qmodel, sample)
    written = checked(to_model(found.ir))
    codes = np.asarray(found.quantize(sample))
    want = [np.asarray(found.run(codes))]
    for level, got in by_onnxruntime(written, {found.ir.inputs[0]: codes}):
        assert differing(got, want) == 0, level
    assert differences(found.ir, written_by_qjax.read(written)) == []
