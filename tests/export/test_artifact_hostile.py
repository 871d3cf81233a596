"""Artifacts from an attacker, who can compute a checksum too: lies behind a valid one."""

import copy
import json

import numpy as np
import pytest

from qjax.export.artifact import ArtifactError, GraphError, from_bytes
from tests.export.sealed import REFUSED, SMALL, build, packed, parts, seal, with_document_text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The graph's JSON: expected JSON, got text that does not parse"),
        ("{} x", "expected JSON, got text that does not parse: Extra data"),
        ("NaN", "expected finite JSON numbers, got NaN"),
        ("[-Infinity]", "expected finite JSON numbers, got -Infinity"),
        ("[1e999]", "expected finite JSON numbers, got 1e999"),
        ("9" * 5000, "expected integers of at most 64 bits, got 999"),
        ("18446744073709551616", "expected an integer within"),
        ('{"target": "a", "target": "b"}', "expected every JSON key once, got 'target' twice"),
        ("[" * 100_000, "expected JSON at most 24 levels deep, got more"),
        ("[" * 30 + "]" * 30, "expected JSON at most 24 levels deep, got more"),
        ('{"a":' * 100_000, "expected JSON at most 24 levels deep, got more"),
        ("[" + "1," * 4_000_001 + "1]", "expected at most 4000000 JSON values, got about 40000"),
        ('"\\ud800"', "expected Unicode, got a lone surrogate"),
        ("3", "The graph: expected an object, got int '3'"),
        ("null", "The graph: expected an object, got null"),
        ("{}", "The graph: expected the fields target, quantization, inputs, .*; got none"),
    ],
)
def test_documents(text, message):
    with pytest.raises(ArtifactError, match=message):
        from_bytes(with_document_text(text))


def change(*path, to):
    """A mutation that sets one place of the document, or removes it with to=...."""

    def apply(document, arrays, data):
        place = {"document": document, "arrays": arrays}
        for key in path[:-1]:
            place = place[key]
        if to is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        return document, arrays, data

    return apply


def w(*path, to):
    return change("document", "tensors", 1, *path, to=to)


def node(*path, to):
    return change("document", "nodes", 0, *path, to=to)


def array(name, field, to):
    return change("arrays", name, field, to=to)


HOSTILE = [
    (change("document", "extra", to=1), "The graph: expected the fields .*; got extra, inputs"),
    (change("document", "nodes", to=...), "The graph: expected the fields"),
    (change("document", "nodes", to={}), "The graph's nodes: expected a list, got a dict"),
    (change("document", "target", to=7), "target: expected a string of 1 to 65536 characters, got int"),
    (change("document", "dequantization", to="sum"), "dequantization: expected one of product, product_sum"),
    (change("document", "dequantization", to=None), "The graph's dequantization: expected a string"),
    (change("document", "inputs", to="x"), "The graph's inputs: expected a list, got str 'x'"),
    (change("document", "inputs", to=[["x"]]), "The graph's inputs: expected a string .*, got a list"),
    (change("document", "inputs", to=["absent"]), "The graph's inputs: there is no tensor 'absent'"),
    (change("document", "outputs", to=["\ud800"]), "lone surrogate"),
    (change("document", "metadata", to=[]), "The graph's metadata: expected an object, got a list"),
    (w(to={}), "A tensor: expected the fields name, shape, dtype, quantization, data; got none"),
    (w("name", to="x"), "Tensor 'x': expected every name once, got it twice"),
    (w("name", to="v"), "Tensor 'v': expected an array 'scale:v', got none"),
    (w("name", to="n" * 65537), "A tensor's name: expected a string .* got 65537 characters"),
    (w("shape", to=[1, -3]), r"Tensor 'w': shape: expected an integer within \[0, 2147483647\], got -3"),
    (w("shape", to=[1, 3.0]), "Tensor 'w': shape: expected an integer, got float '3.0'"),
    (w("shape", to=[True, 3]), "Tensor 'w': shape: expected an integer, got bool 'True'"),
    (w("shape", to=[None, 3]), "Tensor 'w': expected a constant to have a full shape"),
    (w("shape", to=[2**31 - 1, 3]), "expected 3221225471 bytes for 6442450941 codes of 4 bits, got 2"),
    (w("shape", to=[0, *[2**31 - 1] * 3]), "expected a shape that fits the address space"),
    (w("shape", to=[1] * 33), "expected at most 32 dimensions, got 33"),
    (w("shape", to=[1] * 31 + [3]), "Tensor 'w': expected scales of shape"),
    (w("shape", to=[1, 5]), "expected 3 bytes for 5 codes of 4 bits, got 2"),
    (w("shape", to=[1, 2]), "expected 1 bytes for 2 codes of 4 bits, got 2"),
    (w("dtype", to="float64"), "Tensor 'w': expected a dtype of int8, .*; got 'float64'"),
    (w("dtype", to="float32"), "Tensor 'w': expected a tensor with a quantization to hold .* codes; got 'float32'"),
    (w("dtype", to="bool"), "Tensor 'w': expected a tensor with a quantization to hold .* codes; got 'bool'"),
    (w("dtype", to="object"), "got 'object'"),
    (w("dtype", to=None), "Tensor 'w': dtype: expected a string"),
    (w("dtype", to="uint8"), r"Tensor 'w': qmin: expected an integer within \[0, 255\], got -8"),
    (w("dtype", to="int16"), "Tensor 'w': expected its data to be 'plain', got 'packed 4 bits'"),
    (w("data", to="plain"), "Tensor 'w': expected its data to be 'packed 4 bits', got 'plain'"),
    (w("data", to="pickle"), "got 'pickle'"),
    (w("data", to=["packed 4 bits"]), "expected its data to be 'packed 4 bits'"),
    (w("data", to=None), "Tensor 'w': expected one scale, because only constants have scales of their channels"),
    (w("quantization", to=None), "expected its data to be 'plain'"),
    (w("quantization", to=3), "Tensor 'w': quantization: expected an object, got int"),
    (w("quantization", "qmin", to=2.5), "Tensor 'w': qmin: expected an integer, got float"),
    (w("quantization", "qmin", to=-1), r"Tensor 'w': expected codes within \[-1, 7\], got \[-2, 3\]"),
    (w("quantization", "qmax", to=1), r"Tensor 'w': expected codes within \[-8, 1\], got \[-2, 3\]"),
    (w("quantization", "qmax", to=128), "Tensor 'w': qmax: expected an integer within"),
    (w("quantization", "axes", to=[2]), r"Tensor 'w': axes: expected an integer within \[0, 1\], got 2"),
    (w("quantization", "axes", to=[-1]), r"Tensor 'w': axes: expected an integer within \[0, 1\], got -1"),
    (w("quantization", "axes", to=[1, 1]), r"Tensor 'w': expected every axis once, got \[1, 1\]"),
    (w("quantization", "axes", to=[0]), r"Tensor 'w': expected scales of shape \(1,\), got \(3,\)"),
    (node("name", to=0), "A node's name: expected a string"),
    (node("op", to="exec"), "Node 'flatten': unknown operation 'exec'"),
    (node("op", to=[]), "Node 'flatten': op: expected a string .*, got a list"),
    (node("inputs", to=["nobody"]), r"Node 'flatten' \(reshape\): there is no tensor 'nobody'"),
    (node("inputs", to=["y"]), r"reads 'y' before it is computed"),
    (node("output", to="w"), "computes 'w', which exists already"),
    (node("constants", to={"a": "x"}), "its constant a = 'x' carries no data"),
    (node("constants", to={"a": 1}), "Node 'flatten': constant 'a': expected a string"),
    (node("constants", to=[]), "Node 'flatten': constants: expected an object"),
    (node("attributes", to={"a": {}}), "attribute 'a': expected numbers, strings, null"),
    (node("attributes", to={"a": [[{}]]}), "attribute 'a': expected numbers, strings, null"),
    (node("attributes", to={"a": 2**63}), "expected an integer within"),
    (node("attributes", to={"": 1}), "expected a string of 1 to"),
    (node("attributes", to={"shape": "4"}), "Node 'flatten': 'reshape' attribute 'shape': expected a list"),
    (node("attributes", to={}), "Node 'flatten': 'reshape' lacks the attribute 'shape'"),
    (node("location", to=5), "Node 'flatten': expected a location of str or null, got int"),
    (change("arrays", "value:m", to=...), "expected data_offsets|expected arrays"),
    (array("value:m", "dtype", "F32"), "Tensor 'm': expected data of int32 and shape"),
    (array("value:m", "dtype", "F8_E4M3"), "Array 'value:m': expected a dtype among I64, .*; got 'F8_E4M3'"),
    (array("value:m", "dtype", 3), "Array 'value:m': dtype: expected a string"),
    (array("value:m", "shape", [1, 2]), r"expected data of int32 and shape \(2,\), got int32 and \(1, 2\)"),
    (array("value:m", "shape", [3]), r"expected data_offsets \[.*\] for int32 of shape \[3\]"),
    (array("value:m", "shape", [2**31 - 1] * 9), "Array 'value:m': expected data_offsets"),
    (array("value:m", "shape", [-2]), "Array 'value:m': shape: expected an integer within"),
    (array("value:m", "shape", "2"), "Array 'value:m': shape: expected a list"),
    (array("value:m", "data_offsets", [0, 2**40]), "data_offsets: expected an integer within"),
    (array("value:m", "data_offsets", [0]), "Array 'value:m': expected data_offsets"),
    (array("value:m", "data_offsets", [-8, 0]), "data_offsets: expected an integer within"),
    (array("value:m", "data_offsets", [0.0, 8.0]), "data_offsets: expected an integer, got float"),
    (array("value:w", "dtype", "I8"), "Tensor 'w': expected packed data in one row of uint8, got int8"),
    (array("value:w", "shape", [1, 2]), r"packed data in one row of uint8, got uint8 and \(1, 2\)"),
    (array("scale:w", "dtype", "I32"), "Tensor 'w': expected a scale of float32"),
    (array("zero_point:w", "dtype", "F32"), "zero point of int32, got float32 and float32"),
    (array("zero_point:w", "shape", [1]), r"expected a zero point of shape \(\) or \(3,\), got"),
    (change("arrays", "value:m", "extra", to=1), "expected the fields dtype, shape, data_offsets"),
    (change("arrays", "value:m", to=[1]), "Array 'value:m': expected an object, got a list"),
    (lambda d, a, data: (d, a, data + b"\x00"), "expected arrays of .* bytes together, got"),
    (lambda d, a, data: (d, a, data[:-1]), "data_offsets: expected an integer within"),
    (lambda d, a, data: (d, a, data[:-1] + b"\xf3"), "expected zeros in the unused bits of the last"),
]  # fmt: skip


@pytest.mark.parametrize(("mutation", "message"), HOSTILE)
def test_lies_behind_a_valid_checksum(mutation, message):
    with pytest.raises(REFUSED, match=message):
        from_bytes(build(*mutation(*copy.deepcopy(parts(SMALL)))))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales(scale):
    document, arrays, data = parts(SMALL)
    begin, end = arrays["scale:w"]["data_offsets"]
    poisoned = data[:begin] + np.full(3, scale, np.float32).tobytes() + data[end:]
    with pytest.raises(GraphError, match="Tensor 'w': expected finite and positive scales"):
        from_bytes(build(document, arrays, poisoned))


def test_header_lengths():
    rest = json.dumps(packed(json.dumps(parts(SMALL)[0]))) + "}}"
    for length in (2**64 - 1, 2**40, 10_000):
        with pytest.raises(ArtifactError, match=f"expected a header of at most .* got a length of {length}"):
            from_bytes(seal(rest, b"", length=length))
    for length in (0, 1, 100, 300):
        with pytest.raises(ArtifactError, match="The header: expected JSON, got text that does not parse"):
            from_bytes(seal(rest, b"", length=length))


def test_headers():
    text = json.dumps(packed(json.dumps(parts(SMALL)[0])))
    with pytest.raises(ArtifactError, match="expected every JSON key once, got 'graph' twice"):
        from_bytes(seal(text + ',"graph":"{}"}}', b""))
    with pytest.raises(ArtifactError, match="expected every JSON key once, got '__metadata__' twice"):
        from_bytes(seal(text + '},"__metadata__":{}}', b""))
    with pytest.raises(
        ArtifactError, match=r"header's metadata: expected the fields .* got bytes, format, graph, more"
    ):
        from_bytes(seal(text + ',"more":"1"}}', b""))
    with pytest.raises(ArtifactError, match="expected a header in UTF-8"):
        from_bytes(seal(text + "}}\udcff", b""))
