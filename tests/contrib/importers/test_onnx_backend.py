"""ONNX's own node tests of the quantized operators: what they store is what the graph computes."""

import functools
import importlib
import pkgutil
import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case import node

from qjax.contrib.importers.onnx import read
from qjax.export.integer_graph import IntegerGraph
from qjax.export.read_errors import ReadError

NAMES = (
    "test_convinteger_with_padding",
    "test_convinteger_without_padding",
    "test_dequantizelinear",
    "test_dequantizelinear_axis",
    "test_dequantizelinear_blocked",
    "test_dequantizelinear_e4m3fn",
    "test_dequantizelinear_e4m3fn_float16",
    "test_dequantizelinear_e4m3fn_zero_point",
    "test_dequantizelinear_e5m2",
    "test_dequantizelinear_float4e2m1",
    "test_dequantizelinear_int16",
    "test_dequantizelinear_int2",
    "test_dequantizelinear_int4",
    "test_dequantizelinear_uint16",
    "test_dequantizelinear_uint2",
    "test_dequantizelinear_uint4",
    "test_dynamicquantizelinear",
    "test_dynamicquantizelinear_expanded",
    "test_dynamicquantizelinear_max_adjusted",
    "test_dynamicquantizelinear_max_adjusted_expanded",
    "test_dynamicquantizelinear_min_adjusted",
    "test_dynamicquantizelinear_min_adjusted_expanded",
    "test_matmulinteger",
    "test_qlinearconv",
    "test_qlinearmatmul_2D_int8_float16",
    "test_qlinearmatmul_2D_int8_float32",
    "test_qlinearmatmul_2D_uint8_float16",
    "test_qlinearmatmul_2D_uint8_float32",
    "test_qlinearmatmul_3D_int8_float16",
    "test_qlinearmatmul_3D_int8_float32",
    "test_qlinearmatmul_3D_uint8_float16",
    "test_qlinearmatmul_3D_uint8_float32",
    "test_quantizelinear",
    "test_quantizelinear_axis",
    "test_quantizelinear_blocked_asymmetric",
    "test_quantizelinear_blocked_symmetric",
    "test_quantizelinear_e4m3fn",
    "test_quantizelinear_e5m2",
    "test_quantizelinear_float4e2m1",
    "test_quantizelinear_int16",
    "test_quantizelinear_int2",
    "test_quantizelinear_int4",
    "test_quantizelinear_uint16",
    "test_quantizelinear_uint2",
    "test_quantizelinear_uint4",
)
"""ONNX's node tests of the quantized operators."""
WORDS = ("quantizelinear", "qlinear", "matmulinteger", "convinteger")


@functools.cache
def cases():
    """ONNX computes the outputs of all tests of a file at once, and of all files takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node.__path__):
            if any(word in module.name for word in WORDS):
                importlib.import_module(f"{node.__name__}.{module.name}")
        return chosen(node._NodeTestCases)


def chosen(found):
    return {case.name: case for case in found if any(word in case.name for word in WORDS)}


def test_all_of_them_are_here():
    assert set(NAMES) == set(cases())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_no_other_file_has_one():
    assert set(NAMES) == set(chosen(node.collect_testcases(None)))


REFUSED = {
    **{f"test_quantizelinear_{kind}": "activations need one scale" for kind in ("int2", "uint2", "int4", "uint4")},
    "blocked": "scales in blocks",
    "expanded": "Min '.*is the result of 'x' in floats",
    "dynamicquantizelinear": "its scale depends on the data: quantize statically",
    "float4e2m1": "float4e2m1",
    "e4m3fn": "float8e4m3fn",
    "e5m2": "float8e5m2",
    "uint4": "uint4",
    "int4": "int4",
    "uint2": "uint2",
    "int2": "int2",
    "axis": "activations need one scale",
}
"""Part of a name -> the reason. A graph's inputs have one scale, and codes of 8 or 16 bits."""


def frozen(case, keep):
    """The case with the inputs that are not in `keep` as constants, as models have them."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph, (inputs, outputs) = model.graph, case.data_sets[0]
    infos = list(graph.input)
    del graph.input[:]
    feeds = []
    for info, value in zip(infos, inputs, strict=True):
        tensor = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value), info.name)
        tensor.name = info.name
        if info.name in keep:
            graph.input.append(info)
            feeds.append(numpy_helper.to_array(tensor))
        else:
            graph.initializer.append(tensor)
    results = [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else np.asarray(v) for v in outputs]
    return model.SerializeToString(), feeds, results


def computed(name):
    case = cases()[name]
    keep = ("x", "a", "b", "A") if "qlinearmatmul" in name else ("x", "A")
    data, feeds, (expected, *_) = frozen(case, keep)
    graph = IntegerGraph(read(data))
    if "dequantizelinear" in name:
        found = graph.dequantize(*feeds)
    elif "quantizelinear" in name:
        found = graph.quantize(*feeds)
    else:
        found = graph.run(*feeds)
    return np.asarray(found), expected


def refused(name):
    return next((REFUSED[part] for part in REFUSED if part in name), None)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if refused(name) is None))
def test_computes_the_stored_output(name):
    found, expected = computed(name)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if refused(name) is not None))
def test_refuses_with_the_reason(name):
    with pytest.raises(ReadError, match=refused(name)):
        computed(name)
