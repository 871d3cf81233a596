"""Artifacts: what is saved comes back, every bit of it, in a file that others can read."""

import json
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from qjax.export import artifact
from qjax.export.artifact import ArtifactError, GraphError, artifact_size, from_bytes, load, save, to_bytes
from qjax.export.document import unpacked_text
from qjax.graph.ir import Quantization, Tensor
from tests.export.graphs import UNICODE, constant, differences, graph_of, quantization, rich_graph


def test_every_field_comes_back(tmp_path):
    graph = rich_graph()
    save(graph, tmp_path / "m.qjax")
    assert differences(graph, load(tmp_path / "m.qjax")) == []


def test_differences_sees_changes():
    # The oracle of the round trip must itself be able to fail.
    a, b = rich_graph(), rich_graph()
    assert differences(a, b) == []
    assert differences(a, b.replace(target="onnxruntime", metadata={})) == ["target", "metadata"]
    w2 = b.tensors["w2"]
    other = Tensor("w2", w2.shape, "int8", quantization(-2, 1, scale=0.2), np.asarray(w2.value) ^ 1)
    changed = b.replace(tensors={**b.tensors, "w2": other})
    assert differences(a, changed) == ["w2.quantization", "w2.value"]


def test_tuples_become_lists():
    graph = from_bytes(to_bytes(graph_of(value=(1, (2, [3])), metadata={"b": ({"c": ()},)})))
    assert graph.nodes[0].attributes["expression"] == [1, [2, [3]]]
    assert graph.metadata == {"b": [{"c": []}]}


def test_same_graph_same_bytes():
    data = to_bytes(rich_graph())
    assert to_bytes(rich_graph()) == data
    assert to_bytes(from_bytes(data)) == data


def test_same_bytes_in_another_process():
    code = "import sys; from tests.export.graphs import *; from qjax.export.artifact import to_bytes; "
    code += "sys.stdout.buffer.write(to_bytes(rich_graph()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout == to_bytes(rich_graph())


def test_layout_of_arrays_in_memory_does_not_matter():
    codes = np.arange(-12, 12, dtype=np.int16).reshape(4, 6)
    data = to_bytes(graph_of(constant("w", codes, "int16")))
    for same in (np.asfortranarray(codes), codes.astype(">i2"), np.repeat(codes, 2, axis=1)[:, ::2]):
        assert to_bytes(graph_of(Tensor("w", (4, 6), "int16", None, same))) == data


def test_loaded_arrays_are_read_only():
    for tensor in from_bytes(to_bytes(rich_graph())).constants():
        assert isinstance(tensor.value, np.ndarray)
        assert not tensor.value.flags.writeable, tensor.name


def test_safetensors_reads_the_arrays(tmp_path):
    graph = rich_graph()
    save(graph, tmp_path / "m.qjax")
    arrays = safetensors.numpy.load_file(tmp_path / "m.qjax")
    quantized = [t for t in graph.tensors.values() if t.quantization is not None]
    expected = {f"value:{t.name}" for t in graph.constants()}
    expected |= {f"{role}:{t.name}" for t in quantized for role in ("scale", "zero_point")}
    assert set(arrays) == expected
    for tensor in quantized:
        assert tensor.quantization is not None
        assert np.array_equal(arrays[f"scale:{tensor.name}"], np.asarray(tensor.quantization.scale))
        assert np.array_equal(arrays[f"zero_point:{tensor.name}"], np.asarray(tensor.quantization.zero_point))
    for name in ("w8", "u8", "s16", "u16", "s32", "s64", "scalar", "empty", "per_channel_zero", "jax"):
        assert np.array_equal(arrays[f"value:{name}"], np.asarray(graph.tensors[name].value))
    with safetensors.safe_open(tmp_path / "m.qjax", "numpy") as file:
        assert file.metadata()["format"] == "qjax"
        assert json.loads(unpacked_text(file.metadata()["graph"]))["target"] == "tflite_micro"


def test_documented_one_liner_prints_the_structure(tmp_path):
    save(rich_graph(), tmp_path / "model.qjax")
    assert artifact.__doc__ is not None
    command = shlex.split(artifact.__doc__[artifact.__doc__.index("python -c") :])
    assert command[-1] == "model.qjax"
    result = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=True, cwd=tmp_path)
    document = json.loads(result.stdout)
    assert [node["name"] for node in document["nodes"]] == ["première", "second"]
    assert document["nodes"][0]["constants"] == {"table": "s16", "weights": UNICODE, "bias": "s32"}


# Packing


@pytest.mark.parametrize(
    ("qmin", "qmax", "dtype", "bits"),
    [
        *[(low, high, "int8", 4) for low, high in [(-8, 7), (-7, 7), (-4, 3), (0, 15), (-3, 1), (-2, 2)]],
        *[(0, 15, "uint8", 4), (0, 7, "uint8", 4), (3, 4, "uint8", 4)],
        *[(low, high, "int8", 2) for low, high in [(-2, 1), (-1, 1), (-1, 0), (0, 3), (0, 1)]],
        *[(0, 3, "uint8", 2), (0, 1, "uint8", 2), (2, 3, "uint8", 2)],
        *[(low, high, "int8", 8) for low, high in [(-9, 7), (-8, 8), (-1, 15), (-1, 8), (-128, 127)]],
        *[(0, 16, "uint8", 8), (-8, 7, "int16", 16), (0, 3, "int32", 32)],
    ],
)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1000])
def test_every_code_survives_in_the_bits_it_needs(qmin, qmax, dtype, bits, count):
    codes = np.resize(np.arange(qmin, qmax + 1), count).astype(dtype)
    graph = graph_of(Tensor("w", (count,), dtype, quantization(qmin, qmax), codes))
    data = to_bytes(graph)
    assert differences(graph, from_bytes(data)) == []
    assert artifact_size(graph) == -(-count * bits // 8)
    assert safetensors.numpy.load(data)["value:w"].nbytes == artifact_size(graph)


def test_first_code_in_the_lowest_bits():
    nibbles = constant("a", [[1, -2, 3], [-8, 7, 5]], "int8", quantization(-8, 7))
    pairs = constant("b", [0, 1, -2, -1, 1], "int8", quantization(-2, 1))
    arrays = safetensors.numpy.load(to_bytes(graph_of(nibbles, pairs)))
    assert arrays["value:a"].tolist() == [0xE1, 0x83, 0x57]
    assert arrays["value:b"].tolist() == [0b11_10_01_00, 0b01]


@pytest.mark.exhaustive
@given(st.data())
def test_packed_codes_round_trip(data):
    qmin = data.draw(st.integers(-8, 0))
    qmax = data.draw(st.integers(qmin + 1, 7))
    codes = data.draw(st.lists(st.integers(qmin, qmax), max_size=40))
    graph = graph_of(constant("w", codes, "int8", quantization(qmin, qmax)))
    assert differences(graph, from_bytes(to_bytes(graph))) == []


@pytest.mark.exhaustive
@given(st.integers(0, 2**31 - 1).filter(lambda bits: 0 < bits < 0x7F80_0000))
def test_scales_keep_their_bits(bits):
    scale = np.asarray(bits, np.uint32).view(np.float32)
    graph = graph_of(constant("w", [1], "int8", quantization(scale=scale)))
    loaded = from_bytes(to_bytes(graph)).tensors["w"].quantization
    assert loaded is not None
    assert np.asarray(loaded.scale).view(np.uint32) == bits


def test_size_counts_constants_only():
    codes = np.zeros((100, 10), np.int8)
    four = constant("w", codes, "int8", quantization(-8, 7, scale=np.full(10, 0.5), axes=(1,)))
    two = constant("v", codes, "int8", quantization(-2, 1))
    assert artifact_size(graph_of()) == 0
    assert artifact_size(graph_of(four, two, constant("m", [1, 2, 3], "int32"))) == 500 + 250 + 12


# What cannot be saved


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            np.int32(3),
            r"Node 'flatten': attributes: expected None, bool, .* got int32; convert it with int\(\)",
        ),
        (float("nan"), "Node 'flatten': attributes: expected a finite number, got nan"),
        ([1.0, float("-inf")], "expected a finite number, got -inf"),
        (2**63, "expected an integer within .* got 9223372036854775808"),
        ("\ud800", "expected Unicode, got a lone surrogate"),
        ({3: 1}, "a key: expected a string of 1 to 65552 characters, got int '3'"),
        ({"b": 1}, "attribute 'expression': expected numbers, strings, null and lists of these, got an object"),
        ({1, 2}, "got set"),
        (b"bytes", "got bytes"),
    ],
)
def test_attributes_that_json_cannot_hold(value, message):
    with pytest.raises(ArtifactError, match=message):
        to_bytes(graph_of(value=value))


def test_attributes_that_the_operation_does_not_have():
    with pytest.raises(GraphError, match=r"Node 'flatten': 'reshape' has no attribute 'a'\. Its attributes: shape\."):
        to_bytes(graph_of(attributes={"shape": [None, 4], "a": 1}))


def test_attributes_that_contain_themselves():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ArtifactError, match="at most 24 levels deep"):
        to_bytes(graph_of(value=loop))


def test_codes_outside_of_their_range():
    with pytest.raises(GraphError, match=r"Tensor 'w': expected codes within \[-8, 7\], got \[-9, 1\]"):
        to_bytes(graph_of(constant("w", [-9, 1], "int8", quantization(-8, 7))))


def test_scales_that_are_not_float32():
    wide = Quantization(np.asarray(0.1), np.asarray(0, np.int32), -128, 127)
    with pytest.raises(GraphError, match=r"Tensor 'w': expected a scale of float32 .*, got float64 and int32"):
        to_bytes(graph_of(constant("w", [1], "int8", wide)))


def test_graphs_that_are_not_finished():
    with pytest.raises(GraphError, match="expected an integer dtype, got float32"):
        to_bytes(graph_of(Tensor("w", (1,), "float32", None, np.ones(1, np.float32))))


def test_tracers_are_refused(tmp_path):
    def saved(codes):
        save(graph_of(Tensor("w", (3,), "int8", None, codes)), tmp_path / "m.qjax")
        return codes

    with pytest.raises(ArtifactError, match="'w': expected concrete arrays, got a tracer: save the graph outside"):
        jax.jit(saved)(np.zeros(3, np.int8))
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_too_long():
    longest = "n" * 2**16
    graph = graph_of(constant(longest, [1], "int8", quantization()))
    assert differences(graph, from_bytes(to_bytes(graph))) == []
    with pytest.raises(GraphError, match="expected a name of at most 65536 characters, as a file holds it, got 65537"):
        to_bytes(graph_of(constant(longest + "n", [1], "int8")))
    with pytest.raises(ArtifactError, match="expected a string of 1 to 65536 characters, got 0 characters"):
        to_bytes(graph_of(constant("", [1], "int8")))


def test_structure_that_is_too_large():
    with pytest.raises(ArtifactError, match=r"expected a structure of at most 67108864 bytes of JSON, .*: move large"):
        to_bytes(graph_of(metadata={"notes": "x" * 2**26}))


def test_names_that_look_like_the_formats_own():
    awkward = ["__metadata__", "value:", "scale:w", "value:value:w", "w", "..", "a/b\\c", " ", "\x00"]
    graph = graph_of(*(constant(name, [index], "int8", quantization()) for index, name in enumerate(awkward)))
    assert differences(graph, from_bytes(to_bytes(graph))) == []
