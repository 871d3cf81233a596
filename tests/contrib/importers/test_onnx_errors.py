"""What cannot be read is one clear error; what is damaged or hostile is a ReadError, quickly, and nothing else."""

import json
import random
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qjax.contrib.importers.onnx import model as model_module
from qjax.contrib.importers.onnx import read
from qjax.contrib.importers.onnx import walk as walk_module
from qjax.export.emit.onnx.builder import VERSION
from qjax.export.read_errors import ReadError
from qjax.graph.check import GraphError
from tests.contrib.importers.onnx_models import Maker


def small(change=None, **options):
    """x -> Conv -> Reshape -> MatMul -> y, in QDQ form, as a ModelProto; change: (maker) before it is closed."""
    m = Maker(5)
    m.through("x", "xr", 0.02, 120)
    m.codes("w", (6, 3, 3, 3), axis=0, scale=[0.01] * 6, zero_point=[0] * 6)
    m.through(m.node("Conv", ["xr", "w", m.weight("b", 6)], "c", pads=[1, 1, 1, 1]), "cr", 0.03, 9)
    m.node("Reshape", ["cr", m.constant("shape", np.array([-1, 96], np.int64))], "flat")
    m.codes("v", (96, 4))
    m.through(m.node("MatMul", ["flat", "v"], "d"), "y", 0.05, 4)
    if change is not None:
        change(m)
    return m.model({"x": ["N", 3, 4, 4]}, {"y": ["N", 4]}, **options)


@pytest.fixture(scope="module")
def good():
    return small().SerializeToString()


def test_the_small_model_is_fine(good):
    assert [node.op for node in read(good).nodes] == ["conv", "reshape", "dot"]


def test_one_error_lists_every_operator_that_is_not_supported():
    def change(m):
        m.node("Det", ["xr"], "e")
        m.node("DynamicQuantizeLinear", ["xr"], ["dq", "ds", "dz"])
        m.node("LogSoftmax", ["cr"], "s")
        m.node("Tanh", ["s"], "follows")
        m.node("LSTM", ["xr", "xr", "xr"], "h", hidden_size=3)

    with pytest.raises(ReadError, match="4 of the model's operators") as caught:
        read(small(change).SerializeToString())
    text = str(caught.value)
    for part in (
        "Det 'n_e'",
        "DynamicQuantizeLinear 'n_dq'",
        "quantize statically",
        "LogSoftmax 'n_s'",
        "LSTM 'n_h': ONNX Runtime computes its gates and its state in floats",
        "cut the model",
    ):
        assert part in text
    assert "follows" not in text


def test_operators_behind_an_obstacle_and_inputs_are_listed():
    """All at once: two operators in a row that have no form, and two inputs of types that have none."""
    m = Maker(5)
    m.through("x", "xr", 0.02, 120)
    m.node("Det", ["xr"], "e")
    m.node("Erf", ["e"], "kept")
    m.node("NonZero", ["e"], "f")
    m.node("Cast", ["u"], "g", to=TensorProto.FLOAT)
    model = m.model({"x": [1, 3, 3], "u": [2], "v": [2]}, {"kept": [1], "f": [1, 1]})
    for index, kind in ((1, TensorProto.DOUBLE), (2, TensorProto.STRING)):
        model.graph.input[index].type.tensor_type.elem_type = kind
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(ReadError, match="4 of the model's") as caught:
        read(model.SerializeToString())
    for part in ("input 'u': expected float32", "input 'v'", "Det 'n_e'", "NonZero 'n_f'"):
        assert part in str(caught.value)


def test_what_no_check_foresees_names_the_operator(good, monkeypatch):
    def handler(_walk, node, _inputs):
        raise IndexError(node.op)

    monkeypatch.setitem(walk_module._HANDLERS, ("", "Reshape"), handler)
    with pytest.raises(ReadError, match=r"Reshape 'n_flat': qjax expected something else .*IndexError") as caught:
        read(good)
    assert isinstance(caught.value.__cause__, IndexError)


def edited(data, edit):
    model = onnx.load_model_from_string(data)
    edit(model)
    return model.SerializeToString()


def initializer(model, name):
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def node(model, name):
    return next(node for node in model.graph.node if node.output[0] == name)


def external(model):
    tensor = initializer(model, "w_codes")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"


def scale(value):
    def edit(model):
        initializer(model, "xr_s").CopyFrom(onnx.numpy_helper.from_array(np.asarray(value, np.float32), "xr_s"))

    return edit


def recursive(model):
    for name, other in (("A", "B"), ("B", "A")):
        body = [helper.make_node(other, ["a"], ["b"], domain="own")]
        opsets = [helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], body, opsets))
    model.graph.node.append(helper.make_node("A", ["xr"], ["z"], domain="own"))


def laughing(model):
    """Functions that call the next one ten times each."""
    opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 17)]
    for level in range(8):
        op, domain = (f"F{level + 1}", "own") if level < 7 else ("Identity", "")
        body = [helper.make_node(op, ["a"], [f"b{i}" if i else "b"], domain=domain) for i in range(10)]
        model.functions.append(helper.make_function("own", f"F{level}", ["a"], ["b"], body, opsets))
    model.graph.node.append(helper.make_node("F0", ["xr"], ["z"], domain="own"))


def cycle(model):
    node(model, "c").input[0] = "d"


HOSTILE = {
    "data in another file": (external, "its data is in another file"),
    "too few bytes": (lambda m: setattr(initializer(m, "w_codes"), "raw_data", b"12"), "expected 162 bytes"),
    "huge dimensions": (
        lambda m: initializer(m, "w_codes").dims.__setitem__(0, 2**31 - 1),
        "expected 57982058469 bytes",
    ),
    "negative dimension": (lambda m: initializer(m, "w_codes").dims.__setitem__(0, -1), "expected at most 32 sizes"),
    "text": (
        lambda m: setattr(initializer(m, "w_codes"), "data_type", TensorProto.STRING),
        r"is of tensor\(string\), but ONNX takes",
    ),
    "scale nan": (scale(np.nan), "finite and positive"),
    "scale zero": (scale(0), "finite and positive"),
    "scale negative": (scale(-1), "finite and positive"),
    "scale infinite": (scale(np.inf), "finite and positive"),
    "scale subnormal": (scale(1.4e-45), "at least 1.2e-38"),
    "functions that call each other": (recursive, "calls itself"),
    "cycle": (cycle, "form a cycle"),
    "name missing": (
        lambda m: node(m, "c").input.__setitem__(0, "nowhere"),
        "'nowhere', which is no input, no initializer",
    ),
    "name twice": (lambda m: node(m, "d").output.__setitem__(0, "c"), "computes 'c', which exists already"),
    "initializer twice": (lambda m: m.graph.initializer.append(initializer(m, "b")), "expected a unique name"),
    "input twice": (lambda m: m.graph.input.append(m.graph.input[0]), "listed twice"),
    "no output": (lambda m: m.graph.ClearField("output"), "no outputs"),
    "no graph": (lambda m: m.ClearField("graph"), "without a graph"),
    "long name": (lambda m: setattr(m.graph.input[0], "name", "x" * 2000), "names of at most"),
    "kernel does not fit": (lambda m: node(m, "c").attribute.append(helper.make_attribute("group", 3)), "does not fit"),
    "reshape does not fit": (
        lambda m: initializer(m, "shape").CopyFrom(onnx.numpy_helper.from_array(np.array([-1, 95]), "shape")),
        "cannot be reshaped",
    ),
    "metadata that is no JSON": (lambda m: m.metadata_props.add(key="qjax", value="{"), "metadata 'qjax'"),
    "metadata of the next version": (
        lambda m: m.metadata_props.add(key="qjax", value='{"version": 11}'),
        "of version 10, got version 11. Write",
    ),
    "metadata of the last version": (
        lambda m: m.metadata_props.add(key="qjax", value='{"version": 9}'),
        "of version 10, got version 9. Write",
    ),
    "unknown target": (
        lambda m: m.metadata_props.add(key="qjax", value='{"version": 10, "target": "abacus"}'),
        "'abacus', which is unknown",
    ),
    "two names made one": (
        lambda m: m.metadata_props.add(key="qjax", value='{"version": 10, "names": {"xr_q": "cr_q"}}'),
        "two tensors are called 'cr_q'",
    ),
    "a range beyond the codes": (
        lambda m: m.metadata_props.add(key="qjax", value='{"version": 10, "ranges": {"w_codes": [-300, 3]}}'),
        "not within that of its codes",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses(name, good):
    edit, message = HOSTILE[name]
    with pytest.raises(ReadError, match=message):
        read(edited(good, edit))


def test_functions_that_multiply_are_cut_off(good, monkeypatch):
    monkeypatch.setattr(model_module, "MAX_NODES", 500)
    with pytest.raises(ReadError, match="expected at most 500 nodes"):
        read(edited(good, laughing))


@pytest.mark.parametrize("data", [b"", b"\0", b"not a model", b"\x08" * 100], ids=len)
def test_refuses_what_is_no_model(data):
    with pytest.raises(ReadError, match="expected an ONNX model"):
        read(data)


def test_two_free_sizes_are_refused_by_name(good):
    def edit(model):
        dims = model.graph.input[0].type.tensor_type.shape.dim
        dims[2].dim_param = "height"

    with pytest.raises(ReadError, match="height"):
        read(edited(good, edit))


def test_metadata_names_orders_and_annotates(good):
    hints = {
        "version": VERSION,
        "target": "tflite_micro",
        "names": {"xr_q": "x", "cr_q": "conv"},
        "layouts": {"cr_q": [3, 2, 0, 1]},
        "ranges": {"w_codes": [-127, 127]},
        "locations": {"cr_q": "model.py:7"},
        "metadata": {"producer": "someone"},
    }
    plain = read(good, target="tflite_micro")
    graph = read(edited(good, lambda m: m.metadata_props.add(key="qjax", value=json.dumps(hints))))
    assert (graph.target, graph.inputs, dict(graph.metadata)) == ("tflite_micro", ("x",), {"producer": "someone"})
    conv = graph.nodes[0]
    assert (conv.name, conv.location, conv.attributes["rhs_layout"]) == ("conv", "model.py:7", [3, 2, 0, 1])
    kernel = graph.tensors[conv.constants["kernel"]]
    assert kernel.quantization is not None
    codes = np.asarray(plain.tensors["w_codes"].value)
    assert (kernel.shape, kernel.quantization.axes, kernel.quantization.qmin) == ((3, 3, 3, 6), (3,), -127)
    np.testing.assert_array_equal(kernel.value, codes.transpose(2, 3, 1, 0))


OPERATORS = ["Add", "Relu", "Clip", "Shape", "Gather", "Concat", "Slice", "Split", "Pad", "Expand", "ReduceMax"]
OPERATORS += ["Transpose", "Gemm", "MatMulInteger", "ConvInteger", "Cast", "Squeeze", "Flatten", "Constant", "Range"]
OPERATORS += [
    "Sigmoid",
    "Where",
    "Max",
    "ArgMax",
    "Resize",
    "DepthToSpace",
    "ConvTranspose",
    "Softmax",
    "Greater",
    "Pow",
]
ATTRIBUTES = ["axis", "perm", "pads", "strides", "group", "to", "keepdims", "transB", "dilations", "kernel_shape"]
NUMBERS = [0, 1, -1, 2, 3, 6, 10**6, 2**31, 2**62, -(2**62)]


def mutate(model, rng):
    graph = model.graph
    place, tensor = rng.choice(graph.node), rng.choice(graph.initializer)
    names = [name for n in graph.node for name in n.output] + [t.name for t in graph.initializer] + ["x", "", "nope"]
    kind = rng.randrange(10)
    if kind == 0 and place.input:
        place.input[rng.randrange(len(place.input))] = rng.choice(names)
    elif kind == 1:
        place.output[0] = rng.choice(names)
    elif kind == 2:
        place.op_type = rng.choice(OPERATORS)
    elif kind == 3 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif kind == 4:
        tensor.data_type = rng.randrange(30)
    elif kind == 5 and tensor.raw_data:
        raw = bytearray(tensor.raw_data)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        tensor.raw_data = bytes(raw) + (b"\0" if rng.random() < 0.3 else b"")
    elif kind == 6 and place.input:
        del place.input[rng.randrange(len(place.input))]
    elif kind == 7:
        (graph.node.remove if rng.random() < 0.5 else graph.node.append)(place)
    elif kind == 8:
        rng.choice(graph.input[0].type.tensor_type.shape.dim).dim_value = rng.choice(NUMBERS[:7])
    else:
        value = [rng.choice(NUMBERS) for _ in range(rng.randrange(5))] if rng.random() < 0.6 else rng.choice(NUMBERS)
        if value != []:
            place.attribute.append(helper.make_attribute(rng.choice(ATTRIBUTES), value))


@pytest.mark.parametrize("seed", range(3))
def test_mutations_are_refused_or_read(seed, good):
    """Neither another exception nor a long wait, whatever bytes or fields are changed."""
    rng, started = random.Random(seed), time.monotonic()
    for _ in range(250):
        if rng.random() < 0.4:
            raw = bytearray(good)
            for _ in range(rng.randint(1, 5)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            data = bytes(raw)
        else:
            model = onnx.load_model_from_string(good)
            for _ in range(rng.randint(1, 3)):
                mutate(model, rng)
            data = model.SerializeToString()
        try:
            graph = read(data)
        except (ReadError, GraphError):
            continue
        assert graph.target == "onnxruntime"
    assert time.monotonic() - started < 60
