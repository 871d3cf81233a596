"""Files that an earlier qjax wrote are read, as graphs with the codes that they had then."""

from pathlib import Path

import numpy as np
import pytest

import qjax

FILES = Path(__file__).parent / "files"

CONVOLUTION = [[-80, -87, 75, 66], [-26, 5, 22, 127], [-90, 66, 127, -7]]
"""Of a convolution, ReLU and a dense layer, under the target tflite_reference."""
RECURRENT = [
    [[68, 59, -25], [-126, -127, -120], [-127, -112, -109], [123, 127, -77], [112, 37, -127]],
    [[-126, -125, 16], [-128, -126, 34], [126, 127, 116], [-121, -128, -118], [-124, 19, 96]],
]
"""Of a loop over five steps: the file holds its nodes as one compressed document."""


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("version2.qjax", (3, 4, 4, 2), CONVOLUTION),
        ("version3.qjax", (3, 4, 4, 2), CONVOLUTION),
        ("version1.tflite", (3, 4, 4, 2), CONVOLUTION),
        ("version3_integer.onnx", (2, 5, 2), RECURRENT),
    ],
)
def test_a_file_that_was_saved_before(name: str, shape: tuple[int, ...], want: list[list[int]]) -> None:
    path = FILES / name
    graph = qjax.load(path) if path.suffix == ".qjax" else qjax.read(path)
    codes = np.random.default_rng(0).integers(-128, 128, shape, dtype=np.int8)
    assert np.asarray(graph.run(codes)).tolist() == want


def test_the_same_graph_from_both_kinds_of_file() -> None:
    loaded, read = qjax.load(FILES / "version3.qjax"), qjax.read(FILES / "version1.tflite")
    assert str(loaded) == str(read)
