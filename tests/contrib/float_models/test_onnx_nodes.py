"""Every operator beside the examples of ONNX's own specification: `onnx.backend.test.case.node`."""

import functools
import warnings
from collections import Counter
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

import qjax
from qjax.contrib.float_models import onnx_file
from qjax.contrib.float_models.graph import OPERATORS
from qjax.contrib.float_models.module import module_of
from qjax.export.read_errors import ReadError

NAMES = sorted(name for name in OPERATORS if not name.startswith("tflite."))
WITHOUT_EXAMPLE = {"GlobalLpPool", "SimplifiedLayerNormalization"}
"""Operators without an example in ONNX's suite."""

REFUSED = Counter(
    {
        "Adagrad": 2, "Adam": 2, "ArrayFeatureExtractor": 1, "Bernoulli": 3, "Binarizer": 1,
        "CausalConvWithState": 13, "ConvInteger": 2, "DeformConv": 4, "DequantizeLinear": 14,
        "DynamicQuantizeLinear": 3, "FlexAttention": 11, "ImageDecoder": 9, "LabelEncoder": 4, "LinearAttention": 14,
        "Loop": 3, "MatMulInteger": 1, "MelWeightMatrix": 1, "Momentum": 3, "OptionalGetElement": 4,
        "OptionalHasElement": 7, "QLinearConv": 1, "QLinearMatMul": 8, "QuantizeLinear": 13, "RegexFullMatch": 3,
        "RoiAlign": 3, "STFT": 2, "Scan": 4, "SequenceInsert": 2, "SequenceMap": 6, "SplitToSequence": 3,
        "StringConcat": 5, "StringNormalizer": 6, "StringSplit": 6, "SwiGLU": 3, "TfIdfVectorizer": 7,
        "TreeEnsemble": 2,
    }
)  # fmt: skip
"""Operator -> examples, of those that are refused by name."""


@functools.cache
def cases() -> dict[str, Any]:
    """Name of an example -> the example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in collect_testcases(None)}


def operator_of(case) -> str:
    nodes = case.model.graph.node
    return nodes[0].op_type if len(nodes) == 1 else ""


def array(value):
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def check(case) -> None:
    """The module's outputs equal the example's; qjax.Unsupported and ReadError pass through."""
    infos = [*case.model.graph.input, *case.model.graph.output, *case.model.graph.value_info]
    wide = any(info.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for info in infos)
    with jax.enable_x64(wide):
        model = module_of(*onnx_file.read(case.model.SerializeToString()))
        assert case.data_sets
        for given, expected in case.data_sets:
            found = model(*map(array, given))
            found = list(found.values()) if isinstance(found, dict) else [found]
            assert len(found) == len(expected)
            for got, want in zip(map(np.asarray, found), map(array, expected), strict=True):
                narrow = {} if wide else {"int64": "int32", "uint64": "uint32"}
                assert got.dtype.name in (want.dtype.name, narrow.get(want.dtype.name))
                assert got.shape == want.shape
                if want.dtype.kind == "f" or want.dtype.name == "bfloat16":
                    # bfloat16 has 8 bits: two units in the last place. The others: the tolerances of ONNX's suite.
                    rtol = 2**-6 if want.dtype.name == "bfloat16" else max(case.rtol, 1e-3)
                    np.testing.assert_allclose(
                        got.astype(np.float64), want.astype(np.float64), rtol, max(case.atol, 1e-5)
                    )
                else:
                    np.testing.assert_array_equal(got, want.astype(got.dtype))


def is_refused(case) -> bool:
    try:
        check(case)
    except qjax.Unsupported:
        return True
    except ReadError as error:
        # Sequences, optional values and strings are no tensors of numbers.
        if "expected a tensor" in str(error) or "expected numbers" in str(error):
            return True
        raise
    return False


def test_more_than_120_operators():
    assert len(NAMES) >= 150


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_EXAMPLE))
def test_one_example_of_each_operator(name: str):
    found = [case for case in cases().values() if operator_of(case) == name]
    # The smallest that is not refused: most of the time goes into compiling operations of arrays.
    assert not all(map(is_refused, sorted(found, key=lambda case: (len(case.model.SerializeToString()), case.name))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_EXAMPLE))
def test_all_examples_of_each_operator(name: str):
    refused = [case.name for case in cases().values() if operator_of(case) == name and is_refused(case)]
    assert len(refused) == REFUSED_EXAMPLES.get(name, 0), refused


REFUSED_EXAMPLES = {"Cast": 100, "CastLike": 48, "Dropout": 4, "Equal": 2, "Identity": 2, "If": 2}
"""Operator -> examples that are refused although others pass.

Those of casts have elements below 8 bits or floats of 8 bits; those of Dropout draw random numbers; the others have
strings, sequences or optional values.
"""


@pytest.mark.exhaustive
def test_the_other_operators_are_refused_by_name():
    others = [case for case in cases().values() if operator_of(case) not in ("", *NAMES)]
    assert Counter(operator_of(case) for case in others if is_refused(case)) == REFUSED
    assert len(others) == REFUSED.total()


@pytest.mark.exhaustive
def test_graphs_of_several_nodes():
    """Most of them are the bodies of operators that ONNX defines by others."""
    several = [case for case in cases().values() if operator_of(case) == ""]
    refused = [case.name for case in several if is_refused(case)]
    assert len(several) - len(refused) >= 300, refused
