"""The figures of a sensitivity table are those of programs with only these quantizers, in exact arithmetic."""

import json
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.analysis.effect import Effect
from qjax.analysis.switched import SwitchedModel
from tests.analysis.models import Small, coarse, halves, in_halves

BATCHES = [(halves(size, 4, seed=size), np.arange(size) % 3) for size in (8, 4)]


class Added(nnx.Module):
    """A residual: its sum belongs to no layer."""

    def __init__(self):
        self.small, self.wide = Small(), nnx.Linear(4, 3, rngs=nnx.Rngs(5))

    def __call__(self, x):
        return self.small(x) + self.wide(x)


def loss(output, batch):
    """The mean score of the right class: exact in float32."""
    return -jnp.mean(jnp.take_along_axis(output, jnp.asarray(batch[1])[:, None], axis=1))


def metric(output, batch):
    return np.mean(np.argmax(np.asarray(output), -1) == batch[1])


@pytest.fixture(scope="module")
def qmodel():
    recipe = coarse(method="tqt", weight_method="tqt", overrides={"small/first": qjax.Override(qjax.QSpec(2, axis=-1))})
    return qjax.quantize(in_halves(Added(), seed=2), recipe, BATCHES[0][0])


@pytest.fixture(scope="module")
def found(qmodel):
    return qjax.sensitivity(qmodel, iter(BATCHES), inputs=lambda batch: batch[0], loss=loss, metric=metric)


def expected(switched, names):
    """Noise, loss and metric from the outputs, as fractions."""
    noise = signal = change = hits = Fraction(0)
    examples = sum(len(labels) for _, labels in BATCHES)
    for x, labels in BATCHES:
        plain, coded = (np.asarray(switched(chosen, (x,))) for chosen in ((), names))
        for y, q, label in zip(plain, coded, labels, strict=True):
            exact = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(y, q, strict=True)]
            signal += sum(a * a for a, _ in exact)
            noise += sum((a - b) ** 2 for a, b in exact)
            change += exact[label][0] - exact[label][1]
            hits += int(np.argmax(q) == label) - int(np.argmax(y) == label)
    return float(noise / signal), change / examples, hits / examples


def test_every_figure_is_that_of_its_quantizers(qmodel, found):
    switched = SwitchedModel(qmodel)
    everything = set(switched.names)
    assert found.examples == 12
    for row in found.rows:
        for effect, names in ((row.alone, set(row.quantizers)), (row.without, everything - set(row.quantizers))):
            noise, change, hits = expected(switched, names)
            assert effect.noise == noise
            assert effect.sqnr == (-10 * math.log10(noise) if noise else math.inf)
            assert (effect.loss, effect.metric) == (float(change), float(hits))
    assert found.all.noise == expected(switched, everything)[0]
    assert 0 < found.rows[0].alone.noise != found.all.noise > 0


def test_rows_cover_every_quantizer_and_are_sorted(qmodel, found):
    names = {name for row in found.rows for name in row.quantizers}
    assert names == {name for name, _ in qmodel.plan.quantizers}
    assert [row.alone.noise for row in found.rows] == sorted((row.alone.noise for row in found.rows), reverse=True)
    kinds = {row.name: row.kind for row in found.rows}
    layers = ("small/first", "small/middle", "small/last", "wide")
    assert kinds == {**dict.fromkeys(layers, "layer"), "add": "activation"}
    first = found["small/first"]
    assert first.quantizers == ("small/first/kernel", "input", "small/first")
    assert (first.bits, first.activation_bits, first.parameters) == (2, (3, 3), 32)
    with pytest.raises(KeyError, match="No row 'nothing'"):
        found["nothing"]


def test_table_json_and_picture(found, tmp_path):
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["layer", "op", "bits"]
    assert [line.split()[0] for line in lines[2:-1]] == [row.name for row in found.rows]
    assert lines[-1].startswith(f"everything quantized: {found.all.sqnr:.2f} dB, loss ")
    document = json.loads(found.to_json())
    assert [row["alone"]["noise"] for row in document["rows"]] == [row.alone.noise for row in found.rows]
    assert Effect(0.0).to_json() == {"noise": 0.0, "sqnr": None, "loss": None, "metric": None}
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        found.plot(tmp_path / f"picture.{ending}")
        assert (tmp_path / f"picture.{ending}").read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"expected a path that ends in one of .*png"):
        found.plot(tmp_path / "picture.nothing")


def test_what_cannot_be_measured_is_an_error(qmodel):
    with pytest.raises(ValueError, match="at least one batch, got none"):
        qjax.sensitivity(qmodel, [])
    with pytest.raises(ValueError, match=r"expected loss\(output, batch\) to return one number.*got shape \(8, 3\)"):
        qjax.sensitivity(qmodel, [BATCHES[0][0]], loss=lambda output, _: output)
