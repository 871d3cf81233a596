"""Our own ONNX files with something changed: the very graph, another valid one, or a ReadError; never anything else."""

import random

import onnx
import pytest
from onnx import numpy_helper

from qjax.contrib.importers.onnx import read
from qjax.export.emit.onnx import tensors, to_model
from qjax.export.emit.onnx.builder import VERSION
from qjax.export.read_errors import ReadError
from qjax.graph.check import check_integer
from tests.export.emit import nodes
from tests.lower.lowered import dense_chain, residual_network

NUMBERS = (0, 1, -1, 2, 3, 7, 255, -128, 2**31 - 1, -(2**31), 2**40)


def models() -> dict[str, onnx.ModelProto]:
    found = {
        "integer": to_model(nodes.finished(residual_network(), "tflite_micro"), style="integer"),
        "dense": to_model(nodes.finished(dense_chain(), "nearest_even"), style="integer"),
    }
    graph = nodes.finished(residual_network(), "onnxruntime")
    return found | {style: to_model(graph, style=style, codes=True) for style in ("qdq", "qoperator")}


def change_attribute(model, rng):
    held = [onnx.AttributeProto()] + [
        a for n in [*model.graph.node, *(n for f in model.functions for n in f.node)] for a in n.attribute
    ]
    attribute = rng.choice(held)
    kind = rng.randrange(6)
    if kind == 0:
        attribute.name = rng.choice(["rank", "axis", "strides", "padding", "x", ""])
    elif kind == 1 and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)
    elif kind == 2 and attribute.ints:
        del attribute.ints[rng.randrange(len(attribute.ints))]
    elif kind == 3 and attribute.ints:
        attribute.ints.append(rng.choice(NUMBERS))
    elif kind == 4:
        attribute.s = rng.choice([b"[]", b"{}", b"[[0,99]]", b"null", b'"x"', b"\xff", b"double_round", b"[1e400]"])
    else:
        attribute.i = rng.choice(NUMBERS)
        if rng.random() < 0.5:
            attribute.type = rng.choice([1, 2, 3, 4, 6, 7])


def drop_attribute(model, rng):
    node = rng.choice([node for node in model.graph.node if node.attribute] or list(model.graph.node))
    if node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def change_initializer(model, rng):
    tensor = rng.choice(model.graph.initializer)
    kind = rng.randrange(4)
    if kind == 0:
        tensor.data_type = rng.choice([1, 2, 3, 5, 6, 7, 9, 11])
    elif kind == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif kind == 2:
        tensor.name = rng.choice(model.graph.initializer).name
    else:
        value = numpy_helper.to_array(tensor).copy()
        if value.size:
            value.reshape(-1)[rng.randrange(value.size)] = rng.choice([0, 1, 100])
            tensor.raw_data = value.tobytes()


def change_inputs(model, rng):
    node = rng.choice(model.graph.node)
    names = [n for other in model.graph.node for n in (*other.input, *other.output)]
    if rng.random() < 0.3:
        del node.input[rng.randrange(len(node.input))]
    elif rng.random() < 0.5:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    else:
        node.output[0] = rng.choice(names)


def change_operator(model, rng):
    kinds = [*(node.op_type for node in model.graph.node), "Identity", "Relu", "Nothing", ""]
    node = rng.choice(model.graph.node)
    node.op_type = rng.choice(kinds)
    if rng.random() < 0.3:
        node.domain = rng.choice(["", "qjax", "com.microsoft"])


def change_nodes(model, rng):
    index = rng.randrange(len(model.graph.node))
    if rng.random() < 0.5:
        del model.graph.node[index]
    else:
        model.graph.node.append(model.graph.node[index])


def change_facts(model, rng):
    """A word of the metadata."""
    entries = [
        entry
        for held in (
            model,
            *model.graph.node,
            *model.graph.initializer,
            *model.graph.value_info,
            *model.graph.input,
            *model.graph.output,
        )
        for entry in held.metadata_props
    ]
    entry = rng.choice(entries)
    text = entry.value
    start = rng.randrange(len(text))
    word = rng.choice(["0", "null", "-1", "[]", "{}", "1e99", '"x"', "true", "", ":", "9" * 30])
    entry.value = text[:start] + word + text[start + rng.randrange(3) :]


def change_type(model, rng):
    value = rng.choice([*model.graph.input, *model.graph.output])
    kind = value.type.tensor_type
    if rng.random() < 0.5 or not kind.shape.dim:
        kind.elem_type = rng.choice([0, 1, 2, 3, 5, 6, 7, 9, 99])
    else:
        rng.choice(kind.shape.dim).dim_value = rng.choice([0, 1, 5, -1, 2**31])


CHANGES = (
    change_attribute,
    change_attribute,
    drop_attribute,
    change_initializer,
    change_inputs,
    change_operator,
    change_nodes,
    change_facts,
    change_facts,
    change_type,
)


def attempt(model: onnx.ModelProto, seed: int) -> str:
    """What comes of a changed copy."""
    rng = random.Random(seed)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if changed.graph.node:
            rng.choice(CHANGES)(changed, rng)
    try:
        check_integer(read(changed.SerializeToString()))
    except ReadError as error:
        if "metadata=False" not in str(error):
            return "refused"
    else:
        return "read"
    # What is no longer the graph in the metadata is still a model of operators.
    try:
        check_integer(read(changed.SerializeToString(), metadata=False))
    except ReadError:
        return "refused"
    return "read without its metadata"


@pytest.fixture(scope="module")
def emitted():
    return models()


@pytest.mark.parametrize("style", ["integer", "dense", "qdq", "qoperator"])
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sampled(8)
def test_a_changed_file_is_refused_or_read(emitted, style, seed):
    attempt(emitted[style], seed)


@pytest.mark.exhaustive
def test_an_unchanged_file_is_read(emitted):
    for model in emitted.values():
        check_integer(read(model.SerializeToString()))


def test_a_changed_function_is_refused(emitted):
    model = onnx.ModelProto()
    model.CopyFrom(emitted["integer"])
    model.functions[0].node[-1].op_type = "Identity"
    with pytest.raises(ReadError, match="something changed the file"):
        read(model.SerializeToString())


@pytest.mark.parametrize("style", ["integer", "qdq", "qoperator"])
@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_file_of_another_version_is_refused(emitted, style, version):
    model = onnx.ModelProto()
    model.CopyFrom(emitted[style])
    facts = tensors.taken(model)
    del model.metadata_props[:]
    tensors.put(model, {**facts, "version": version})
    message = f"expected qjax's metadata of version {VERSION}, got version {version}. Write the file again"
    for metadata in (True, False) if style != "integer" else (True,):
        with pytest.raises(ReadError, match=message):
            read(model.SerializeToString(), metadata=metadata)


def test_the_message_of_a_changed_attribute(emitted):
    """Where a kernel fails on what the file says, the reader says which file that is, and the cause stays chained."""
    model = onnx.ModelProto()
    model.CopyFrom(emitted["integer"])
    reshape = next(node for node in model.graph.node if node.name == "flat")
    reshape.attribute[0].s = b"[0]"
    reshape.attribute[0].type = onnx.AttributeProto.STRING
    with pytest.raises(ReadError, match="Emit the graph again, or load its") as caught:
        read(model.SerializeToString())
    assert caught.value.__cause__ is not None
