"""Parts of `experiments.real` that need none of the packages with weights.

`make real` runs the networks, and `--originals` compares them with what the packages compute.
"""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
from flax import nnx

from experiments.real import data, edge, page, torch_file, weights
from experiments.real.methods import Setting, in_batches
from experiments.real.network import Network, batched, built, loaded, put
from experiments.real.networks.crepe import CENTS, cents
from experiments.real.networks.mtcnn import overlap
from experiments.real.row import Row, cosine, decibels, keep, read

NUMBERS = np.arange(12, dtype=np.float32)
WANTED = {"whole": NUMBERS.reshape(3, 4), "part": NUMBERS[4:8], "turned": NUMBERS.reshape(3, 4).T}


class _FloatStorage:
    """Stands for torch's class of that name."""


def _rebuild_tensor_v2(*_):
    """Stands for torch's function of that name."""


class _Tensor:
    def __init__(self, offset, shape, strides):
        self.arguments = (_Storage(), offset, shape, strides, False, OrderedDict())

    def __reduce__(self):
        return _rebuild_tensor_v2, self.arguments


class _Storage:
    pass


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return ("storage", _FloatStorage, "0", "cpu", len(NUMBERS)) if isinstance(obj, _Storage) else None


@pytest.fixture
def state(monkeypatch):
    """A state dict as torch pickles it: three tensors that share one storage."""
    utils, torch = types.ModuleType("torch._utils"), types.ModuleType("torch")
    for thing, module, name in (
        (_rebuild_tensor_v2, utils, "_rebuild_tensor_v2"),
        (_FloatStorage, torch, "FloatStorage"),
    ):
        thing.__module__, thing.__qualname__ = module.__name__, name
        setattr(module, name, thing)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made = OrderedDict(whole=_Tensor(0, (3, 4), (4, 1)), part=_Tensor(4, (4,), (1,)), turned=_Tensor(0, (4, 3), (1, 4)))
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(made)
    return file.getvalue()


@pytest.mark.parametrize("form", ["archive", "stream"])
def test_a_file_of_torch(form, state, tmp_path):
    path = tmp_path / "weights.pth"
    if form == "archive":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("weights/data.pkl", state)
            file.writestr("weights/data/0", NUMBERS.tobytes())
    else:
        heads = [pickle.dumps(head, 2) for head in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        keys = pickle.dumps(["0"], 2)
        path.write_bytes(b"".join([*heads, state, keys, np.int64(len(NUMBERS)).tobytes(), NUMBERS.tobytes()]))
    found = torch_file.read(path)
    assert list(found) == list(WANTED)
    for name, array in WANTED.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_file_of_torch_runs_no_code(tmp_path):
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weights/data.pkl", pickle.dumps(print, 2))
    with pytest.raises(ValueError, match=r"a file of tensors only, got one that names .*print"):
        torch_file.read(path)


def test_missing_weights_name_the_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("QJAX_WEIGHTS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make weights"):
        weights.file("silero_vad", "data")


class _Small(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(2, 3, rngs=rngs)


def test_every_weight_must_come():
    model = built(_Small)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), got \(3, 2\)"):
        put(model.dense.kernel, np.zeros((3, 2)))
    put(model.dense.kernel, np.ones((2, 3)))
    with pytest.raises(ValueError, match="Expected weights for dense/bias, got none"):
        loaded(model)


def test_sentences_and_their_topics():
    texts, topics = data.sentences()
    assert len(texts) == len(topics) > 100
    assert len(set(texts)) > 0.9 * len(texts)
    assert topics.max() > 8


def test_measures():
    activity = np.zeros((1, 360))
    activity[0, 100:102] = 0.5
    np.testing.assert_allclose(cents(activity), CENTS[100:102].mean())
    corrections = np.array([[0.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(overlap(corrections, np.zeros((2, 4))), [1.0, 0.5])
    a = (np.array([[1.0, 0.0], [3.0, 4.0]]),)
    assert decibels(a, a) == float("inf")
    np.testing.assert_allclose(decibels((a[0] * 1.1,), a), 20)
    np.testing.assert_allclose(cosine((np.array([[1.0, 1.0], [3.0, 4.0]]),), a), 0.5**0.5)


def test_rows_are_kept_and_shown(tmp_path):
    path = tmp_path / "rows.jsonl"
    keep(path, [Row("net", "calibrate", "W8A8", error="ValueError: no")])
    keep(path, [Row("net", "calibrate", "W8A8", decibels=float("inf"), cosine=1.0, score=50.0, seconds=2.0)])
    rows = list(read(path).values())
    assert [row.error for row in rows] == [""]
    other = Row("net", "qwix PTQ", "W8A8", decibels=20.0, cosine=1.0, score=40.0, seconds=1200.0)
    static = Row("net", "ai-edge-quantizer static", "W8A8", decibels=10.0, cosine=1.0, score=30.0, seconds=2.0)
    batches = batched(2, np.zeros((5, 3)))
    assert [len(batch[0]) for batch in batches] == [2, 2]
    network = Network("net", "a CNN", "package, file", nnx.Module(), batches, batches, "right", lambda *_: 50.0)
    text = page.page([network], [Row("net", "float", "float", score=60.0, original=1e-6), *rows, other, static])
    summary = "60.0 | exact / 50.0 |  | 10.0 / 30.0 ai-edge-quantizer static |  | 20.0 / 40.0 qwix PTQ |"
    assert f"| net, W8A8 | {summary}" in text
    assert "| qwix PTQ | 20.0 | 1.000 | 40.0 | 1200 |  |" in text
    assert "Task: right. Float: 60.0 %." in text
    assert "| calibrate | exact | 1.000 | 50.0 | 2 |  |" in text
    assert "| net | package, file | 4 | 4 | 1.0e-06 |" in text


def test_batches_of_any_size_from_a_function_of_one_size():
    seen: list[int] = []

    def call(x, y):
        seen.append(len(x))
        return x + y, x

    x = np.arange(7.0)
    sums, same = in_batches(call, 3)(x, 10 * x)
    assert np.array_equal(sums, 11 * x)
    assert np.array_equal(same, x)
    assert seen == [3, 3, 3]


def test_codes_of_a_litert_file():
    detail = {"quantization": (0.5, 3), "dtype": np.int8}
    codes = edge.codes(np.array([-100.0, 0.0, 0.75, 100.0], np.float32), detail)
    assert np.array_equal(codes, np.array([-128, 3, 5, 127], np.int8))
    assert np.array_equal(edge.reals(codes, detail), np.array([-65.5, 0.0, 1.0, 62.0], np.float32))
    floats = {"quantization": (0.0, 0), "dtype": np.float32}
    assert np.array_equal(edge.reals(edge.codes(codes, floats), floats), codes)


def test_a_rival_that_crashes_is_an_error_of_its_row(monkeypatch):
    batches = batched(2, np.zeros((4, 3)))
    network = Network("no such network", "a CNN", "package", nnx.Module(), batches, batches, "right", lambda *_: 0.0)
    with pytest.raises(RuntimeError, match=r"ended with code 1\. KeyError: 'no such network'"):
        edge.quantized(network, Setting(8, 8), exact=False, kind="static")
    monkeypatch.setattr(edge.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with code 1"):
        edge.quantized(network, Setting(8, 8), exact=False, kind="dynamic")
    with pytest.raises(NotImplementedError, match="8 or 16 bits"):
        edge.quantized(network, Setting(4, 4), exact=False, kind="static")
