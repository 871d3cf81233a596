"""Statistics against numpy on the codes and reals themselves, batch by batch put together."""

import json
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

import qjax
from tests.analysis.models import Deep, Small, coarse, data

BATCHES = [data(8, 4, seed=seed) * (1 + seed) for seed in range(3)]


@pytest.fixture(scope="module")
def qmodel():
    model: Any = Small()
    model.first.kernel[...] = model.first.kernel[...].at[:, 2].set(0.0)
    model.first.bias[...] = model.first.bias[...].at[2].set(-1.0)
    return qjax.quantize(model, coarse(4), BATCHES[0])


@pytest.fixture(scope="module")
def found(qmodel):
    return qjax.statistics(qmodel, iter(BATCHES))


def ratio(x, y):
    """dB, in float64."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return 10 * math.log10(np.sum(x**2) / np.sum((x - y) ** 2))


def test_an_input_is_what_numpy_says(qmodel, found):
    x, p = np.concatenate([np.asarray(b) for b in BATCHES]), qmodel.qparams()["input"]
    scale, zero = np.float32(p.scale), int(p.zero_point)
    steps = np.rint(x * (np.float32(1) / scale)) + zero
    codes = np.clip(steps, p.spec.qmin, p.spec.qmax)
    got = found["input"]
    assert (got.values, got.low, got.high) == (x.size, float(x.min()), float(x.max()))
    assert got.clipped == np.mean(steps != codes) > 0
    assert got.used == len(np.unique(codes)) / 16
    counts = np.array(list(Counter(codes.reshape(-1).tolist()).values())) / x.size
    assert round(got.entropy, 12) == round(-float(np.sum(counts * np.log2(counts))), 12)
    assert round(got.sqnr, 9) == round(ratio(x, (codes - zero).astype(np.float32) * scale), 9)
    assert got.sqnr == got.float_sqnr  # nothing stands before it
    assert (got.bits, got.dead, got.channels, got.headroom) == (4, 0, 4, None)


def test_dead_channels_and_a_weight(found):
    first, kernel = found["first"], found["first/kernel"]
    assert (first.dead, first.channels) == (1, 8)  # its bias holds it under the relu
    assert (kernel.dead, kernel.channels) == (1, 8)
    assert (kernel.kind, kernel.values) == ("weight", 32)
    assert kernel.sqnr == kernel.float_sqnr
    assert first.float_sqnr < first.sqnr  # what comes from the input is in the one, not in the other


@pytest.mark.exhaustive
def test_noise_against_the_float_model_is_the_outputs(qmodel, found):
    last = found["last"]
    assert round(last.float_sqnr, 4) == round(qjax.sensitivity(qmodel, BATCHES).all.sqnr, 4)


def test_headroom_is_the_graphs(qmodel, found):
    nodes = {node.name: node for node in qjax.accumulators(qjax.convert(qmodel, BATCHES[0])).nodes}
    assert {t.name: t.headroom for t in found.tensors if t.headroom is not None} == {
        name: 32 - node.total_bits for name, node in nodes.items()
    }
    assert found.no_integers is None


def test_some_tensors_by_pattern_table_and_json(qmodel, found):
    some = qjax.statistics(qmodel, BATCHES, ["input", r".*/kernel"])
    assert [t.name for t in some.tensors] == ["input", "first/kernel", "middle/kernel", "last/kernel"]
    assert all(found[t.name] == t for t in some.tensors)
    assert some.examples == 24
    lines = str(some).splitlines()
    assert lines[0].split()[0] == "tensor"
    assert lines[-1] == "24 examples"
    document = json.loads(some.to_json())
    assert [t["entropy"] for t in document["tensors"]] == [t.entropy for t in some.tensors]


def test_what_cannot_be_looked_at(qmodel):
    with pytest.raises(ValueError, match=r"'nothing' matches no quantized tensor\. Tensors: input, "):
        qjax.statistics(qmodel, BATCHES, ["nothing"])
    with pytest.raises(ValueError, match="nodes: expected regular expressions"):
        qjax.statistics(qmodel, BATCHES, ["("])
    with pytest.raises(ValueError, match="at least one batch"):
        qjax.statistics(qmodel, [])
    with pytest.raises(KeyError, match="No tensor 'nothing'"):
        qjax.statistics(qmodel, BATCHES[:1], ["first/kernel"])["nothing"]


@pytest.mark.exhaustive
def test_a_scan_has_a_row_for_each_iteration():
    x = data(5, 3)
    found = qjax.statistics(qjax.quantize(Deep(), coarse(4), x), [x, x], r"layers/kernel")
    assert [t.name for t in found.tensors] == [f"layers/kernel[{i}]" for i in range(3)]
    kernel = np.asarray(Deep().layers.kernel[...])
    for i, row in enumerate(found.tensors):
        assert (row.low, row.high, row.values) == (float(kernel[i].min()), float(kernel[i].max()), 16)


def test_without_an_integer_form_there_is_no_headroom(qmodel, monkeypatch):
    def convert(*_):
        raise qjax.ConversionError("This part has no integer form.\nA second line.")

    monkeypatch.setattr(sys.modules["qjax.analysis.statistics"], "convert", convert)
    found = qjax.statistics(qmodel, BATCHES[:1], "last")
    assert str(found).endswith("8 examples; no headroom, since: This part has no integer form.")
    assert found.no_integers is not None
    assert [t.headroom for t in found.tensors] == [None, None]
