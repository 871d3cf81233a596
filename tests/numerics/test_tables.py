"""Tables of sigmoid and tanh: LiteRT's own answers where its float32 steps decide the code."""

import zlib

import numpy as np
import pytest

from conformance import cases
from qjax.numerics.gemmlowp import gemmlowp_table
from qjax.numerics.lookup import lookup_table
from qjax.numerics.tables import TABLE_METHODS, function_table

GRIDS = {"logistic": (2.0**-8, -128), "tanh": (2.0**-7, 0)}

# CRC-32 of the tables of 24 scales near ties, from ai-edge-litert 2.3.0 on glibc 2.36
CHECKSUMS = [
    ("tflite", "logistic", 1591890263),
    ("tflite", "tanh", 439810320),
    ("xnnpack", "logistic", 3111675228),
    ("xnnpack", "tanh", 701015142),
]


@pytest.mark.parametrize(("method", "function", "checksum"), CHECKSUMS)
def test_tables_of_litert(method, function, checksum):
    tables = [
        function_table(method, function, float(case.grids[0].scale), case.grids[0].zero_point, *GRIDS[function])
        for case in cases.table(function, "int8", count=24, near_ties=True, seed=77)
    ]
    assert all(table.dtype == np.int32 and table.shape == (256,) for table in tables)
    assert zlib.crc32(np.concatenate(tables).astype(np.int8).tobytes()) == checksum


# (method, function, scale, zero point, input code, LiteRT's code, the nearest one)
@pytest.mark.parametrize(
    ("method", "function", "scale", "zero_point", "code", "theirs", "nearest"),
    [
        ("tflite", "logistic", 0.005628048907965422, -50, 115, 56, 55),
        ("tflite", "logistic", 0.0032556229270994663, -7, -19, -2, -3),
        ("tflite", "tanh", 0.0013735978864133358, 75, -72, -25, -26),
        ("xnnpack", "logistic", 0.006839544977992773, -128, 108, 86, 85),
        ("xnnpack", "logistic", 0.0055533647537231445, -69, 49, 40, 41),
        ("xnnpack", "tanh", 0.0030480576679110527, -9, -62, -20, -21),
    ],
)
def test_not_the_nearest_code(method, function, scale, zero_point, code, theirs, nearest):
    grid = np.float32(scale), zero_point, *GRIDS[function]
    assert function_table(method, function, *grid)[code + 128] == theirs
    assert function_table("exact", function, *grid)[code + 128] == nearest


@pytest.mark.parametrize("function", GRIDS)
def test_methods_are_one_code_apart_at_most(function):
    grid = np.float32(0.043), 11, *GRIDS[function]
    tables = [function_table(method, function, *grid) for method in TABLE_METHODS]
    assert max(np.abs(table - tables[0]).max() for table in tables) <= 1
    assert np.array_equal(tables[0], lookup_table(function, *grid))
    assert np.array_equal(tables[1], gemmlowp_table(function, np.float32(0.043), 11))


def test_ranges():
    table = function_table("tflite", "tanh", 0.05, 128, 2.0**-7, 128, x_range=(0, 255), y_range=(0, 200))
    assert table.shape == (256,)
    assert (table.min(), table.max(), table[128]) == (0, 200, 128)


def test_errors():
    with pytest.raises(ValueError, match=r"a method among exact, gemmlowp, tflite, xnnpack\. Got 'float'"):
        function_table("float", "tanh", 0.1, 0, 2.0**-7, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"with scale 0\.0078125 and zero point 0\. Got scale 0\.1 and zero point 3"):
        function_table("gemmlowp", "tanh", 0.1, 0, 0.1, 3)
    with pytest.raises(ValueError, match=r"expected a function among logistic, tanh\. Got 'relu'"):
        function_table("xnnpack", "relu", 0.1, 0, 0.1, 0)
    with pytest.raises(ValueError, match=r"scales must be finite and positive\. Got 0\.0"):
        function_table("tflite", "tanh", 0.0, 0, 0.1, 0)
    with pytest.raises(ValueError, match="ranges must not be empty"):
        function_table("tflite", "tanh", 0.1, 0, 0.1, 0, x_range=(3, 2))
