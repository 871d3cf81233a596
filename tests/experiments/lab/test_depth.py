"""The study of drift with depth: its codes against `qjax.compare` and the interpreter, its theory against counting."""

import math

import numpy as np
import pytest

import qjax
from experiments.lab import chain_theory as theory
from experiments.lab.chains import Quantized, codes_of, drift, ends_of, quantized
from experiments.lab.depth_claims import FLOOR


@pytest.fixture(scope="module")
def chain() -> Quantized:
    return quantized(3, 32, 128, relu=True, residual=False, seed=3)


@pytest.fixture(scope="module")
def residual() -> Quantized:
    return quantized(2, 16, 32, relu=True, residual=True, seed=4)


@pytest.mark.exhaustive
def test_counts_are_those_of_compare(chain: Quantized) -> None:
    target = chain.graph.retarget("double_round")
    report = qjax.compare(chain.graph, target, np.asarray(chain.reference[chain.graph.ir.inputs[0]]))
    found = drift(chain, "double_round")
    assert found.arise.count == sum(node.own.count for node in report.nodes if node.op == "dot") > 0
    assert found.share[-1] == report.outputs[0].end_to_end.count / report.outputs[0].end_to_end.compared
    assert found.bias[-1] == report.outputs[0].end_to_end.mean


@pytest.mark.exhaustive
def test_codes_are_those_of_the_interpreter(residual: Quantized) -> None:
    graph = residual.graph.retarget("tflite_micro")
    codes = residual.reference[graph.ir.inputs[0]]
    assert np.array_equal(codes_of(graph, codes)[graph.ir.outputs[0]], graph.run(codes))


def test_every_layer_has_an_end(chain: Quantized, residual: Quantized) -> None:
    assert len(ends_of(chain.graph.ir, False)) == 3
    ends = ends_of(residual.graph.ir, True)
    assert len(ends) == 2
    assert ends[-1] == residual.graph.ir.outputs[0]


def test_layers_say_what_the_scales_are(chain: Quantized) -> None:
    ir = chain.graph.ir
    for layer, node in zip(chain.layers, ir.nodes, strict=True):
        s_x, s_y = (float(ir.tensors[name].quantization.scale) for name in (node.inputs[0], node.output))  # pyright: ignore[reportOptionalMemberAccess]
        kernel = ir.tensors[node.constants["kernel"]]
        assert kernel.quantization is not None
        s_w = np.asarray(kernel.quantization.scale, np.float64).ravel()
        assert np.allclose(layer.scale, s_x * s_w / s_y, rtol=2.0**-30, atol=0)
        # e lies in [2^(-r-1), 2^-r)
        assert np.array_equal(layer.right, [-math.floor(math.log2(e)) - 1 for e in layer.scale])
        weights = np.asarray(kernel.value, np.float64)
        assert layer.gain == pytest.approx(np.mean(np.sum((weights * layer.scale) ** 2, 0)))


def test_two_roundings_by_counting() -> None:
    # all high words and fractions of a shift by 3, in integers: round the word to 2^-31 first, then by 2^3
    right, fine = 3, 16
    wrong = 0
    for value in range(2**right * fine):
        once = math.floor(value / (fine * 2**right) + 0.5)
        first = math.floor(value / fine + 0.5)
        twice = math.floor(first / 2**right + 0.5)
        wrong += once != twice
    assert wrong / (2**right * fine) == 2.0 ** -(right + 1)


def test_rounded_differences_by_counting() -> None:
    found = theory.rounded(np.array([0.3, -1.75]), np.array([0.5, 0.5]))
    phases = (np.arange(10_000) + 0.5) / 10_000
    for difference, chance in ((0.3, 0.5), (-1.75, 0.5)):
        steps = np.rint(phases + difference) - np.rint(phases)
        for step in np.unique(steps):
            share = chance * np.mean(steps == step)
            assert found[int(step) + theory.REACH] == pytest.approx(share, abs=1e-3)
    assert found.sum() == pytest.approx(1)


def test_differences_only_spread_where_there_are_any(chain: Quantized) -> None:
    spread = theory.spread(chain)
    assert np.all(np.diff(spread.touched) > 0)
    assert spread.share[0] == pytest.approx(spread.touched[0] / 32)
    assert np.all(spread.share <= spread.touched)


@pytest.mark.exhaustive
def test_truncation_loses_half_a_step_behind_one_layer() -> None:
    chain = quantized(1, 32, 256, relu=False, residual=False, powers_of_two=True)
    bits = chain.layers[0].right + 1.0
    # without a relu the loss has no part along the activations but by chance
    assert theory.truncation_bias(chain)[0] == pytest.approx(-np.mean(1 - 2.0**-bits) / 2, abs=0.02)
    found = drift(chain, FLOOR)
    assert found.bias[0] == pytest.approx(-0.5, abs=5 * 0.5 / math.sqrt(256 * 32))
    same = drift(chain, "fpga")
    assert not same.share.any()
