"""`qjax run`: the graph on files, and what it refuses."""

import dataclasses
import io
import pickle
import warnings
import zipfile

import numpy as np
import pytest

from qjax.cli import arrays, inputs
from qjax.cli.errors import Refused
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Node, Tensor

RNG = np.random.default_rng(3)


@pytest.fixture
def x(folder):
    reals = RNG.normal(size=(7, 5)).astype(np.float32)
    np.save(folder / "x.npy", reals)
    return reals


@pytest.mark.exhaustive
def test_reals(qjax, graphs, folder, x):
    said = qjax("run", "dense.qjax", "x.npy", "-o", "y.npy").stdout
    assert said == "y.npy: y float32 7x4\n"
    np.testing.assert_array_equal(np.load(folder / "y.npy"), graphs["dense"](x))


def test_codes_in_batches(qjax, graphs, folder, x):
    codes = np.asarray(graphs["dense"].quantize(x))
    np.savez(folder / "codes.npz", codes)
    qjax("run", "dense.qjax", "codes.npz", "--codes", "--batch-size", 3, "-o", "y.npz")
    with np.load(folder / "y.npz") as found:
        assert list(found) == ["y"]
        assert found["y"].dtype == np.int8
        np.testing.assert_array_equal(found["y"], graphs["dense"].run(codes))


def test_another_target(qjax, graphs, folder, x):
    qjax("run", "dense.qjax", "x.npy", "--target", "nearest_even", "-o", "y.npy")
    np.testing.assert_array_equal(np.load(folder / "y.npy"), graphs["dense"].retarget("nearest_even")(x))


def test_two_inputs_and_outputs_by_name(qjax, graphs, folder):
    words, bias = RNG.integers(0, 6, 4).astype(np.int32), RNG.normal(size=(4, 3)).astype(np.float32)
    np.savez(folder / "named.npz", bias=bias, words=words)
    np.save(folder / "words.npy", words)
    np.save(folder / "bias.npy", bias)
    expected = graphs["pair"](words, bias)
    for given in (["named.npz"], ["words.npy", "bias.npy"]):
        qjax("run", "pair.qjax", *given, "-o", "both.npz")
        with np.load(folder / "both.npz") as found:
            assert sorted(found) == ["rows", "sum"]
            np.testing.assert_array_equal(found["sum"], expected[0])
            np.testing.assert_array_equal(found["rows"], expected[1])


def test_summary(qjax, graphs, x):
    said = qjax("run", "dense.qjax", "x.npy").stdout.splitlines()
    y = np.asarray(graphs["dense"](x))
    assert said[0] == f"y float32 7x4, from {y.min():.6g} to {y.max():.6g}"
    assert said[1] == "  first example: " + " ".join(f"{value:.6g}" for value in y[0])
    assert said[2] == "  argmax: " + " ".join(map(str, y.argmax(1)))


def test_big_endian_and_fortran_files(qjax, graphs, folder, x):
    np.save(folder / "big.npy", np.asfortranarray(x).astype(">f4"))
    qjax("run", "dense.qjax", "big.npy", "-o", "y.npy")
    np.testing.assert_array_equal(np.load(folder / "y.npy"), graphs["dense"](x))


# ---------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.zeros((2, 5)), "input 'x': expected floats of dtype float32, got float64: array.astype(np.float32)."),
        ("x", np.zeros((2, 5), np.int8), "add --codes if the file holds codes."),
        ("x", np.zeros((2, 6), np.float32), "Input 'x': expected shape (batch, 5), got (2, 6)."),
        ("x", np.zeros(5, np.float32), "Input 'x': expected shape (batch, 5), got (5,)."),
        ("x", np.zeros((0, 5), np.float32), "no example"),
        ("z", np.zeros((2, 5), np.float32), "expected arrays called x (or arr_0, ... in this order), got z"),
        ("x", np.zeros((2, 5), np.complex64), "expected an array of numbers, got dtype '<c8'"),
        ("x", np.asarray(["a"]), "expected an array of numbers"),
    ],
)
def test_wrong_arrays(refused, folder, name, value, message):
    np.savez(folder / "wrong.npz", **{name: value})
    assert message in refused("run", "dense.qjax", "wrong.npz")


def test_wrong_codes(refused, folder):
    np.save(folder / "reals.npy", np.zeros((2, 5), np.float32))
    assert "leave --codes out to give floats" in refused("run", "dense.qjax", "reals.npy", "--codes")
    np.save(folder / "wide.npy", np.zeros((2, 5), np.int16))
    assert "expected codes of dtype int8, got int16" in refused("run", "dense.qjax", "wide.npy", "--codes")
    indices = {"words": np.zeros(2, np.int64), "bias": np.zeros((2, 3), np.float32)}
    np.savez(folder / "indices.npz", **indices)
    assert "expected indices of dtype int32, got int64" in refused("run", "pair.qjax", "indices.npz")


def test_codes_out_of_range(folder, graphs):
    graph = graphs["dense"].ir
    tensor = graph.tensors["x"]
    four = dataclasses.replace(tensor, quantization=dataclasses.replace(tensor.quantization, qmin=-8, qmax=7))
    np.save(folder / "codes.npy", np.full((1, 5), 8, np.int8))
    with pytest.raises(Refused, match=r"expected codes within \[-8, 7\], got \[8, 8\]"):
        inputs.read(graph.replace(tensors={**graph.tensors, "x": four}), [str(folder / "codes.npy")], codes=True)


def test_inputs_that_are_missing(refused, folder):
    assert refused("run", "dense.qjax", "none.npy") == "none.npy: expected a .npy file, got no file: check the path."
    assert "got 0 files" in refused("run", "pair.qjax")
    np.save(folder / "bias.npy", np.zeros((2, 3), np.float32))
    assert "expected one .npy file for each of words, bias" in refused("run", "pair.qjax", "bias.npy")
    assert "expected a .npy file" in refused("run", "dense.qjax", "dense.qjax")


def npy(value) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


ONE = np.zeros((1, 1), np.float32)


def shaped(text: str) -> bytes:
    """A file of one float32 that claims another shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {text}, }}".encode() + b" \n"
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a .npy file of numbers"),
        (b"PK\3\4nonsense", "expected a .npy file of numbers"),
        (npy(np.zeros((2, 5), np.float32))[:-1], "expected 40 bytes of data, got 39"),
        (npy(np.zeros((2, 5), np.float32)) + b"x", "expected 40 bytes of data, got 41"),
        (shaped("(99999999, 9)"), "expected 3599999964 bytes"),
        (shaped("(2305843009213693952, 8)"), "expected 73786976294838206464 bytes"),
        (shaped("(9223372036854775808, 0)"), "expected 0 bytes of data, got 4"),
        (shaped(f"({'1, ' * 33})"), "at most 32 dimensions, got 33"),
        (shaped("(9**9999, 1)"), "expected a .npy file of numbers"),
        (shaped("(-1, -1)"), "expected a .npy file of numbers"),
        (shaped("1" * 60_000), "expected a .npy file of numbers"),
        (shaped("(" * 60_000), "expected a .npy file of numbers"),
        (npy(np.zeros(2, [("a", "i4")])), "expected a .npy file of numbers"),
        (npy(ONE)[:8], "expected a .npy file of numbers"),
        (npy(np.asarray([print], object)), "expected an array of numbers, got dtype '|O'"),
        (pickle.dumps(print), "expected a .npy file of numbers"),
    ],
)
def test_hostile_npy_files(refused, folder, content, message):
    """Nothing is unpickled, and no memory is taken that the file does not fill."""
    (folder / "hostile.npy").write_bytes(content)
    assert message in refused("run", "dense.qjax", "hostile.npy")


def test_hostile_npz_files(refused, folder, monkeypatch):
    (folder / "hostile.npz").write_bytes(b"PK\3\4 no archive")
    assert "expected a .npz file, got another or a damaged one" in refused("run", "dense.qjax", "hostile.npz")
    monkeypatch.setattr(arrays, "MAX_BYTES", 10_000)
    with zipfile.ZipFile(folder / "hostile.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.zeros((10_000, 5), np.float32)))
    assert "expected at most 10000 bytes of arrays" in refused("run", "dense.qjax", "hostile.npz")
    with zipfile.ZipFile(folder / "hostile.npz", "w") as archive:
        archive.writestr("x.npy", npy(np.zeros(2, np.float32)))
        archive.writestr("x", npy(np.zeros(2, np.float32)))
    assert "two arrays are called 'x'" in refused("run", "dense.qjax", "hostile.npz")


def test_outputs_that_cannot_be_written(refused, folder, x):
    (folder / "kept.npy").write_bytes(b"as it was")
    assert "ends in .npy or .npz" in refused("run", "dense.qjax", "x.npy", "-o", "y.txt")
    assert "create it first" in refused("run", "dense.qjax", "x.npy", "-o", "none/y.npy")
    np.savez(folder / "two.npz", words=np.zeros(2, np.int32), bias=np.zeros((2, 3), np.float32))
    message = refused("run", "pair.qjax", "two.npz", "-o", "kept.npy")
    assert message == "kept.npy: expected one output for a .npy file, got 2: write a .npz."
    assert (folder / "kept.npy").read_bytes() == b"as it was"
    (folder / "folder.npy").mkdir()
    assert "expected the name of a file, got a folder" in refused("run", "dense.qjax", "x.npy", "-o", "folder.npy")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".qjax")] == []


def test_an_output_without_a_scale(refused, qjax, graphs, folder, x):
    """A sum that nothing rescales, as models read from other formats may end in."""
    pair = graphs["pair"].ir
    tensors = {"words": pair.tensors["words"], "same": Tensor("same", (None, 1), "int32")}
    node = Node("same", "reshape", ("words",), "same", {}, {"shape": [None, 1]})
    bare = pair.replace(tensors=tensors, nodes=(node,), inputs=("words",), outputs=("same",))
    IntegerGraph(bare).save(folder / "bare.qjax")
    np.save(folder / "words.npy", np.arange(3, dtype=np.int32))
    assert "has no scale" in refused("run", "bare.qjax", "words.npy")
    qjax("run", "bare.qjax", "words.npy", "--codes", "-o", "same.npy")
    np.testing.assert_array_equal(np.load(folder / "same.npy"), np.arange(3)[:, None])


def test_every_dtype_of_numbers_and_every_version(tmp_path):
    for code in "?bBhHiIlLqQefd":
        for order in "<>":
            value = np.arange(12).reshape(3, 2, 2).astype(f"{order}{np.dtype(code).str[1:]}")
            for version in ((1, 0), (2, 0), (3, 0)):
                with open(tmp_path / "x.npy", "wb") as file, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    np.lib.format.write_array(file, value[::-1].T, version)
                (found,) = arrays.read([str(tmp_path / "x.npy")], ["x"])
                assert found.dtype == np.dtype(code)
                np.testing.assert_array_equal(found, value[::-1].T)
    for value in (np.float32(3), np.zeros((0, 4), np.int8), np.zeros(1, np.int8)):
        np.save(tmp_path / "x.npy", value)
        (found,) = arrays.read([str(tmp_path / "x.npy")], ["x"])
        assert (found.shape, found.dtype) == (np.shape(value), value.dtype)
        np.testing.assert_array_equal(found, value)
