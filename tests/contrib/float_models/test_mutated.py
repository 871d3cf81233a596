"""Damaged files: an error of qjax, never another one, and never a loop without end."""

import numpy as np
import pytest

import qjax
from qjax.contrib.float_models import onnx_file, tflite_file
from qjax.contrib.float_models.module import module_of
from qjax.export.read_errors import ReadError
from tests.contrib.float_models.onnx_nets import attention, cnn
from tests.contrib.float_models.test_tflite_operators import ALL, written

FILES = {
    "onnx": [cnn().SerializeToString(), attention(1).SerializeToString()],
    "tflite": [written(op, case) for op, case in list(ALL.values())[::9]],
}


def mutant(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, dropped or added, half of them near the end, where names and shapes are."""
    found = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        near = min(len(found), 1500) if rng.random() < 0.5 else len(found)
        place = len(found) - 1 - int(rng.integers(near))
        kind = rng.integers(4)
        if kind == 0:
            found[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            found[place] = int(rng.integers(256))
        elif kind == 2:
            del found[place : place + int(rng.integers(1, 4))]
        else:
            found[place:place] = rng.bytes(int(rng.integers(1, 4)))
    return bytes(found)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 10))])
def test_mutants(kind: str, seed: int):
    rng, read, refused = np.random.default_rng(seed), 0, 0
    for _ in range(200):
        data = mutant(FILES[kind][rng.integers(len(FILES[kind]))], rng)
        try:
            module_of(*(onnx_file.read(data) if kind == "onnx" else tflite_file.read(data)))
            read += 1
        except (ReadError, qjax.Unsupported):
            refused += 1
    assert read + refused == 200
    assert refused >= 20
