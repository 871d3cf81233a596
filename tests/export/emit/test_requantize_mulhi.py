"""A requantization in 32 bits: the rule's codes for every accumulator, and no number leaves a word."""

import dataclasses

import numpy as np
import pytest

from qjax.export.emit.requantizations import line_of
from qjax.export.emit.requantize_as_shift import Line
from qjax.export.emit.requantize_mulhi import HighWords, high_words
from qjax.numerics import get_rule, requantize
from tests.export.emit.test_onnx_requantizing import CHANNELS, product_of


def word(number: int) -> int:
    assert -(2**31) <= number < 2**31
    return number


def code_of(found: HighWords, channel: int, acc: int) -> int:
    """What the functions of C compute, in Python's integers."""
    total = word(acc + int(found.first[channel]))
    offset = int(found.offset[channel])
    if found.kink is not None and found.below is not None and total < word(int(found.kink[channel])):
        offset = int(found.below[channel])
    product = word(total << found.up) * word(int(found.factor[channel]))
    sums = word((product >> 32) + word(offset))
    return min(max(sums >> found.shift, found.lowest), found.highest)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["single_round", "double_round", "float64_away", "nearest_even"])
@pytest.mark.parametrize("greatest", [2**-8, 2**-5])
def test_the_codes_of_every_accumulator(rule, greatest):
    rng = np.random.default_rng(0)
    kernel = rng.integers(-127, 128, (9, CHANNELS)).astype(np.int8)
    kernel[:, 1] = 0
    bias = rng.integers(-3000, 3000, CHANNELS).astype(np.int32)
    product = product_of(rule, rng.uniform(greatest / 4, greatest, CHANNELS).astype(np.float32), kernel, bias)
    line_and_shape = line_of(product, bits=31)
    assert line_and_shape is not None
    line, _ = line_and_shape
    positive, negative = (part.astype(np.int64).sum(0) for part in (kernel.clip(min=0), kernel.clip(max=0)))
    low, high = positive * -100 + negative * 155, positive * 155 + negative * -100
    found = high_words(line, low, high)
    assert found is not None
    assert (found.kink is None) == (line.kink is None)
    constants = get_rule(rule).constants(**{role: product.values[role] for role in get_rule(rule).fields})
    acc = np.linspace(low, high, 5000, dtype=np.int64)
    want = np.asarray(requantize((acc + bias).astype(np.int32), constants, rule=rule, zero_point=-3))
    got = [[code_of(found, channel, number) for channel, number in enumerate(row)] for row in acc.tolist()]
    assert np.array_equal(got, want)
    assert np.array_equal(found.codes(acc), want)


def test_what_has_no_form():
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    low, high = np.full(1, -1000), np.full(1, 1000)
    plain = Line(one << 20, none, 26, -128, 127, -16, 16, 2**31)
    assert high_words(plain, low, high) is not None
    assert high_words(dataclasses.replace(plain, raised=none[None]), low, high) is None
    assert high_words(dataclasses.replace(plain, factor=-plain.factor), low, high) is None
    # a product of more than 62 bits once its factor has 31
    assert high_words(dataclasses.replace(plain, product=2**61), low, high) is None
