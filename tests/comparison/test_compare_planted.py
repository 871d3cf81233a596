"""`qjax.compare` names planted differences: constants, grids, accumulators, forms of scales."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import qjax
from qjax import targets
from qjax.numerics.accumulator import Accumulator
from qjax.run.interpreter import run
from tests.comparison.compared import REALS, before_rounding, built, edited, regridded


@pytest.mark.parametrize(
    ("tensor", "node", "kind", "text"),
    [
        ("h/bias", "h", "bias", "1 of 4 biases differ, by at most 900"),
        ("y/kernel", "y", "accumulator", "1 of 252 weights differ, by at most 9"),
        ("clipped/clamp_max", "clipped", "constant", "1 of 1 values of 'clamp_max' differ, by at most 3"),
        ("r/factor1", "r", "scale", "1 of 1 values of 'factor1' differ"),
        ("h/shift", "h", "scale", "effective scales differ"),
    ],
)
def test_planted_constants_are_named(tensor: str, node: str, kind: str, text: str) -> None:
    amounts = {"h/bias": 900, "y/kernel": 9, "clipped/clamp_max": -3, "r/factor1": 2**24, "h/shift": 1}

    def change(value: np.ndarray) -> np.ndarray:
        flat = value.reshape(-1)
        flat[0] += amounts[tensor] if flat[0] <= 100 or tensor != "y/kernel" else -amounts[tensor]
        return value

    a = built("nearest_even")
    report = qjax.compare(a, edited(a, tensor, change), REALS)
    found = report.first
    assert found is not None
    assert found.name == node
    assert [n.name for n in report.diverging] == [node]
    assert [c.kind for c in found.causes] == [kind]
    assert text in found.text
    assert found.causes[0].count == found.own.count
    assert all(not n.findings for n in report.nodes if n.name != node)


def test_planted_weight_counts_accumulators() -> None:
    a = built("nearest_even")

    def change(value: np.ndarray) -> np.ndarray:
        value[0, 0] += 1 if value[0, 0] < 127 else -1
        return value

    report = qjax.compare(a, edited(a, "y/kernel", change), REALS)
    env = run(a.ir, a.interpreter.constants, [a.quantize(REALS)])
    moved = int(np.sum(np.asarray(env["flat"])[:, 0] != 3))
    assert report["y"].accumulators == moved
    assert f"{moved:,} of the 336 accumulators differ" in report["y"].text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scale": np.float32(2.0**-4 * 1.01)}, "the scales of 'r' differ here"),
        ({"zero_point": np.int32(-19)}, "the zero points of 'r' differ here"),
        ({"qmax": 100}, "the ranges of codes of 'r' differ here"),
    ],
)
def test_planted_grids_are_named(changes: dict[str, Any], text: str) -> None:
    a = built("nearest_even")
    report = qjax.compare(a, regridded(a, "r", **changes), REALS)
    assert any(text == finding.text for finding in report["r"].findings)
    assert all(c.kind == "grid" for node in report.diverging for c in node.causes)
    if "scale" not in changes:  # a scale alone is read by nobody: the multipliers are constants
        assert report.first is report["r"]
        assert text.capitalize()[:1] + text[1:] in report["r"].text


def test_accumulators_of_another_width() -> None:
    narrow = Accumulator(14, "saturate")
    a, b = built("nearest_even"), built("nearest_even", accumulator=narrow, name="narrow")
    report = qjax.compare(a, b, REALS)
    node = report["h"]
    assert [c.kind for c in node.causes] == ["accumulator"]
    assert "The accumulator's bits are 32 in nearest_even, 14 saturate in narrow" in node.text
    x = [a.quantize(REALS)]
    sums = [before_rounding(g, g.ir.nodes[0], x)[0] for g in (a, b)]
    assert node.accumulators == int(np.sum(np.asarray(sums[0]) != np.asarray(sums[1]))) > 0


def test_scales_formed_in_float32() -> None:
    """The same rule under two forms of the effective scale: decided by its last bits, or nothing differs."""
    rule = targets.Weighted
    a = built("nearest_even", requantize=rule("neon", "f64"), name="doubles")
    b = built("nearest_even", requantize=rule("neon", "f32"), name="floats")
    report = qjax.compare(a, b, REALS)
    texts = [f.text for f in report["y"].findings if f.kind == "scale"]
    assert len(texts) == 1
    assert "doubles forms them in doubles; floats forms them from a float32 product" in texts[0]
    assert all(c.kind in ("scale", "tie", "double_rounding") for n in report.diverging for c in n.causes)


def test_accumulators_are_the_sums_of_products() -> None:
    """int64 sums of centred codes by numpy, for every kind of node."""
    graph = built("tflite_micro")
    env = {k: np.asarray(v) for k, v in run(graph.ir, graph.interpreter.constants, [graph.quantize(REALS)]).items()}
    found = {
        node.name: [np.asarray(acc) for acc in before_rounding(graph, node, [jnp.asarray(env[n]) for n in node.inputs])]
        for node in graph.ir.nodes
    }
    x, h = env["x"].astype(np.int64) + 5, env["h"].astype(np.int64)
    assert np.array_equal(found["r"][0], x)
    assert np.array_equal(found["r"][1], h)
    assert found["clipped"] == found["flat"] == []
    clipped = env["clipped"].astype(np.int64) + 20
    assert np.array_equal(found["p"][0], clipped.reshape(48, 3, 2, 3, 2, 4).sum((2, 4)))
    node = next(n for n in graph.ir.nodes if n.name == "h")
    kernel, bias = (np.asarray(graph.ir.constant(node, role)).astype(np.int64) for role in ("kernel", "bias"))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    total = sum(padded[:, i : i + 6, j : j + 6] @ kernel[i, j] for i in range(3) for j in range(3))
    assert np.array_equal(found["h"][0], total + bias)
    node = graph.ir.nodes[-1]
    kernel, bias = (np.asarray(graph.ir.constant(node, role)).astype(np.int64) for role in ("kernel", "bias"))
    assert np.array_equal(found["y"][0], (env["flat"].astype(np.int64) - 3) @ kernel + bias)
