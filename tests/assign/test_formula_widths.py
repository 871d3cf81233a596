"""A runtime's formula serves only the widths of codes that the runtime has an operation for."""

import numpy as np
import pytest

from qjax import targets
from qjax.assign.formulas import formula_for
from qjax.graph.ir import Node, Quantization, Tensor


def tensor(name: str, dtype: str) -> Tensor:
    info = np.iinfo(dtype)
    grid = Quantization(np.asarray(0.01, np.float32), np.asarray(0, np.int32), int(info.min), int(info.max))
    return Tensor(name, (None, 4), dtype, grid)


@pytest.mark.parametrize(
    ("target", "dtypes", "found"),
    [
        ("tflite_micro", ("int8", "int8", "int8"), True),
        ("tflite_micro", ("int16", "int16", "int16"), True),
        # 20 bits up, codes of 16 bits leave int32
        ("tflite_micro", ("int16", "int8", "int8"), False),
        ("tflite_micro", ("int8", "int8", "int16"), False),
        ("tflite_optimized_arm", ("int16", "int8", "int8"), False),
        ("tosa", ("int8", "int8", "int8"), True),
        ("tosa", ("int16", "int16", "int16"), False),
    ],
)
def test_widths_without_an_operation_get_the_exact_sum(target, dtypes, found):
    tensors = {name: tensor(name, dtype) for name, dtype in zip("aby", dtypes, strict=True)}
    node = Node("add", "add", ("a", "b"), "y", {}, {"subtract": False})
    formula = formula_for(tensors, node, "add", 1, tensors["y"], targets.get(target))
    assert (formula is not None) == found
