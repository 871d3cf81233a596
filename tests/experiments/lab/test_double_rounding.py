"""The study of double rounding: its codes against unbounded integers, its accumulators against a product by hand."""

from fractions import Fraction

import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.lab import double_rounding as study
from experiments.lab.digit_sums import distinct
from qjax.contrib.lab.study import Settings
from qjax.numerics import quantize_multiplier


def _away(x: Fraction) -> int:
    return int(x + Fraction(1, 2)) if x >= 0 else -int(-x + Fraction(1, 2))


@pytest.mark.parametrize("shift", [0, 1, 4, 9])
def test_codes_are_those_of_unbounded_integers(shift: int) -> None:
    acc, scale = study.uniform(np.random.default_rng(0), 512, shift, 2**20)
    m = quantize_multiplier(scale)
    assert np.all(-m.shift == shift)
    once, double, neon, tosa = study.codes_of(("single_round", "double_round", "neon", "tosa_double"), acc, scale)
    for i in range(acc.size):
        product = int(acc[i]) * int(m.multiplier[i])
        high = (product + 2**30) >> 31
        assert once[i] == (product + (1 << (30 + shift))) >> (31 + shift)
        assert double[i] == _away(Fraction(high, 2**shift))
        assert neon[i] == (high + ((1 << shift) >> 1)) >> shift
        if shift:
            assert tosa[i] == double[i]


def test_all_fixed_point_rules_of_the_library_are_in_the_study() -> None:
    fields = [(name, qjax.numerics.get_rule(name)) for name in qjax.numerics.rule_names()]
    fixed = {name for name, rule in fields if rule.fields == ("multiplier", "shift") and not rule.needs_key}
    assert {*study.RULES, *study.LEFT_OUT} == fixed
    assert len(study.RULES) + len(study.LEFT_OUT) == len(fixed)


def test_predicted_shares() -> None:
    assert study.differing_share("one", "one", 4) == 0
    assert study.differing_share("one", "two, up", 4) == 1 / 32
    assert study.differing_share("two, up", "two, away", 4) == 1 / 32
    assert study.differing_share("15 bits", "one", 4) == 2**-11


@pytest.mark.exhaustive
def test_distinct_accumulators_are_the_products_by_hand() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 12)).astype(np.float32)
    qmodel = qjax.quantize(nnx.Linear(12, 5, rngs=nnx.Rngs(0)), qjax.Recipe(target="single_round"), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    (node,) = graph.ir.nodes
    (found,) = distinct(graph, x)
    tensor = graph.ir.tensors[graph.ir.inputs[0]].quantization
    assert tensor is not None
    codes = np.asarray(graph.quantize(x)).astype(object) - int(np.asarray(tensor.zero_point))
    kernel, bias, multiplier = (np.asarray(graph.ir.constant(node, role)) for role in ("kernel", "bias", "multiplier"))
    sums = codes @ kernel.astype(object) + bias.astype(object)
    expected = [np.unique(sums[:, channel].astype(np.int64)) for channel in range(5)]
    assert np.array_equal(found.acc, np.concatenate(expected))
    assert np.array_equal(np.frexp(found.scale)[0] * 2.0**31, np.repeat(multiplier, [e.size for e in expected]))


def test_every_prediction_has_a_name_of_its_own() -> None:
    names = [p.name for p in study.predict(Settings())]
    assert len(names) == len(set(names))
