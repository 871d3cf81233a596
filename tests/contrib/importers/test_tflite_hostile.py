"""Damaged and forged .tflite files: a clear error or a valid graph, never anything else, within bounded time."""

import json
import time

import numpy as np
import pytest

from qjax.contrib.importers import tflite as reader
from qjax.export.read_errors import ReadError
from qjax.graph.check import GraphError, check_integer
from tests.contrib.importers import tflite_cases as cases
from tests.contrib.importers.tflite_models import File, Grid

SECONDS = 5.0
"""Per file, on a machine that does other things besides."""


def attempt(data: bytes) -> str:
    """Read; what came of it. Raises whatever a reader must not raise."""
    start = time.monotonic()
    try:
        check_integer(reader.read(data))
        result = "graph"
    except (ReadError, GraphError) as error:
        result = str(error)
    assert time.monotonic() - start < SECONDS
    return result


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    small = [
        cases.weighted("int8", only="conv"),
        cases.weighted("uint8", only="fully_connected"),
        cases.transposed("int8", only="transpose_conv"),
        cases.elementwise("int8", only="average_pool, same"),
        cases.elementwise("int16", only="add"),
        cases.functions("int8", only="leaky_relu"),
        cases.functions("int8", only="softmax"),
        cases.choices("int8", only="arg_max"),
        cases.choices("int8", only="top_k"),
        cases.choices("int8", only="greater"),
        cases.choices("int8", only="nearest, odd"),
        cases.choices("int8", only="mirror_pad"),
        cases.choices("int8", only="space_to_depth"),
        cases.choices("int8", only="gather"),
    ]
    names = ("strided_slice, masks", "split_v", "pack", "unpack", "pad", "reshape", "broadcast_to", "slice", "squeeze")
    return small + [cases.moves("int8", only=name) for name in names]


def test_bytes_that_are_flipped(files):
    rng = np.random.default_rng(0)
    seen = set()
    for number in range(1500):
        data = bytearray(files[number % len(files)])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(8, len(data)))] = int(rng.integers(0, 256))
        seen.add(attempt(bytes(data))[:20])
    assert {"graph", "damaged .tflite fil"} <= {text[:19] for text in seen} | {"graph"}


@pytest.mark.parametrize("step", [20, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_words_that_are_extreme(files, step):
    """Offsets, lengths, sizes, axes: every aligned word in turn, or every fifth one."""
    words = [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\0\0", b"\0\0\xc0\x7f", b"\x01\0\0\x40"]
    for index, file in enumerate(files):
        for place in range(4 * index % step, len(file) - 4, step):
            word = words[(place // 4 + index) % len(words)]
            attempt(file[:place] + word + file[place + 4 :])


def test_files_that_end_early(files):
    for file in files:
        for size in range(0, len(file), max(len(file) // 40, 1)):
            assert "damaged" in attempt(file[:size]) or size > len(file) - 64


def build(**fields) -> bytes:
    """x -> RELU -> y, with fields of x changed."""
    file, grid = File(), Grid(0.1, 3)
    x = file.tensor("int8", fields.pop("shape", (1, 4)), fields.pop("grid", grid), **fields)
    y = file.tensor("int8", (1, 4), grid)
    file.operator("RELU", [x], [y])
    return file.to_bytes([x], [y])


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_must_be_positive(scale):
    assert "finite and positive" in attempt(build(grid=Grid(scale, 3)))


def test_activations_have_one_scale():
    assert "input 't0': 't0' has 2 scales" in attempt(build(grid=Grid((0.1, 0.2), 3)))


def test_zero_points_must_be_codes():
    assert "zero point out of" in attempt(build(grid=Grid(0.1, 128)))


def test_shapes_are_bounded():
    assert "elements" in attempt(build(shape=(2**30, 2**30, 2**30)))
    assert "a size of -1" in attempt(build(shape=(-1, 4)))


def test_variables_and_sparse_tensors_are_listed():
    assert "a variable" in attempt(build(isVariable=True))


def test_shapes_must_be_those_of_the_operators():
    assert "is stated as (1, 4), and computed as (1, 5)" in attempt(build(shape=(1, 5)))


def test_a_tensor_is_computed_once_and_before_it_is_read():
    def model(first, second) -> bytes:
        file, grid = File(), Grid(0.1, 3)
        for _ in range(3):
            file.tensor("int8", (1, 4), grid)
        file.operator("RELU", *first)
        file.operator("RELU", *second)
        return file.to_bytes([0], [2])

    assert "before it is computed" in attempt(model(([2], [1]), ([1], [2])))
    assert "again" in attempt(model(([0], [2]), ([0], [2])))
    assert "again" in attempt(model(([0], [0]), ([0], [2])))
    assert "tensor 7 of 3" in attempt(model(([0], [7]), ([0], [2])))


def test_control_flow_is_listed():
    file, grid = File(), Grid(0.1, 3)
    x, y = (file.tensor("int8", (1, 4), grid) for _ in range(2))
    file.operator("RELU", [x], [y])
    file.model.subgraphs.append(file.graph)
    assert "2 subgraphs" in attempt(file.to_bytes([x], [y]))


def test_many_tables_at_one_place_cost_no_time():
    """A vector of offsets that all lead to one operator with long lists."""
    file, grid = File(), Grid(0.1, 3)
    x, y = (file.tensor("int8", (1, 4), grid) for _ in range(2))
    file.operator("CONCATENATION", [x] * 20000, [y], "Concatenation")
    file.graph.operators *= 1
    file.operator("RELU", [x], [y])
    file.graph.operators += [file.graph.operators[0]] * 50
    attempt(file.to_bytes([x], [y]))


def test_forged_metadata_is_refused(small_own):
    """The document says what the operators do not."""
    data, document = small_own
    text = json.dumps(document, separators=(",", ":")).encode()
    assert text in data
    changes = [
        (b'"relu"', b'"tanh"'),
        (b'"target":"tflite_reference"', b'"target":"tflite_micro__"[:0]'),
        (b'"version":3', b'"version":2'),
        (b'"axis"', b'"axes"'),
        (b'"quantization":"division_away"', b'"quantization":"reciprocal___"'),
    ]
    for old, new in changes:
        forged = data.replace(old, new[: len(old)].ljust(len(old)))
        if forged != data:
            assert "metadata=False" in attempt(forged)


@pytest.fixture
def small_own(monkeypatch):
    """A file that qjax wrote, and its document, which is not compressed here so that bytes of it can be changed."""
    from qjax.export import document
    from qjax.export.emit.tflite import to_bytes
    from qjax.export.tflite_schema.model import parse

    for name in ("deflated", "inflated"):
        monkeypatch.setattr(document, name, lambda data: data)
    data = to_bytes(reader.read(cases.elementwise("int8", only="add, relu6")))
    start, end = parse(data).metadata["qjax"]
    return data, json.loads(data[start:end])


def test_a_damaged_document_is_refused():
    """Compressed text, one byte at a time; and text that unpacks to more than is allowed."""
    from qjax.export.emit.tflite import to_bytes
    from qjax.export.tflite_schema.model import parse

    graph = reader.read(cases.elementwise("int8", only="add, relu6"))
    data = to_bytes(graph)
    start, end = parse(data).metadata["qjax"]
    for place in (start, start + 1, (start + end) // 2, end - 1):
        changed = bytearray(data)
        changed[place] ^= 0x55
        assert "metadata=False" in attempt(bytes(changed))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("qjax.export.document.MAX_TEXT", 100)
        assert "larger than 100 bytes" in attempt(data)


def test_own_files_that_are_flipped(small_own):
    data, _ = small_own
    rng = np.random.default_rng(1)
    for _ in range(120):
        forged = bytearray(data)
        forged[int(rng.integers(8, len(forged)))] = int(rng.integers(0, 256))
        attempt(bytes(forged))
