"""Each rule on operators made by hand: what it takes, and what it says of the rest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qjax.contrib import profiles
from qjax.contrib.profiles import Operator, Source, Tensor, rules
from qjax.contrib.profiles.page import markdown

SOURCE = Source("a page", "https://example.com")


def tensor(name="x", shape: Any = (1, 4, 4, 2), dtype="int8", scale: Any = 0.5, zero=0, data=None, axis=None):
    scales = None if scale is None else np.asarray(scale, np.float32).reshape(-1)
    zeros = None if scales is None else np.broadcast_to(np.asarray(zero, np.int64), scales.shape)
    return Tensor(name, shape, dtype, scales, zeros, axis, False, None if data is None else (lambda: np.asarray(data)))


def operator(*inputs, name="Op", outputs=(), options=None, weight=None, bias=None, on_codes=False):
    return Operator(name, "node", inputs, tuple(outputs), options or {}, "file.py:1", weight, bias, on_codes)


def conv(codes, dtype="int8", scale: Any = 0.5, zero=0, bias=None, **options):
    kernel = tensor("w", np.shape(codes), dtype, scale, zero, codes, 0)
    known = {"stride_w": 1, "stride_h": 1, "padding": 1, **options}
    return operator(tensor(), kernel, bias, name="CONV_2D", outputs=[tensor("y")], options=known, weight=1, bias=2)


ONES = np.ones((3, 3, 3, 2), np.int8)

CASES = [
    (rules.activations({"int8"}, SOURCE, cure="c"), operator(tensor()), operator(tensor(dtype="uint8")), "'x': uint8"),
    (
        rules.activations({"int8"}, SOURCE, symmetric=True, cure="c"),
        operator(tensor()),
        operator(tensor(zero=3), tensor("y", zero=4)),
        "'x': zero point 3, and 1 more like it",
    ),
    (
        rules.activations({"int8"}, SOURCE, cure="c"),
        operator(tensor()),
        operator(tensor(scale=[0.5, 0.25])),
        "'x': 2 scales",
    ),
    (
        rules.activations({"int8"}, SOURCE, cure="c"),
        operator(tensor()),
        operator(tensor(scale=None)),
        "'x': int8 without a scale",
    ),
    (
        rules.activations({"int8"}, SOURCE, indices={"Op"}, cure="c"),
        operator(tensor(), outputs=[tensor("y", dtype="int32", scale=None)]),
        operator(tensor(dtype="uint8")),
        "'x': uint8",
    ),
    (rules.weights({"int8"}, SOURCE, cure="c"), conv(ONES), conv(ONES, "uint8"), "'w' of uint8"),
    (rules.weights({"int8"}, SOURCE, cure="c"), conv(ONES), conv(ONES, zero=3), "'w' with the zero point 3"),
    (rules.weights({"int8"}, SOURCE, least=-127, cure="c"), conv(ONES), conv(ONES * -128), "'w' with the code -128"),
    (
        rules.weights({"int8"}, SOURCE, per_channel={"Other"}, cure="c"),
        conv(ONES),
        conv(ONES, scale=[0.5, 0.25, 1]),
        "'w' with 3 scales",
    ),
    (
        rules.bias({"int32"}, SOURCE, cure="c"),
        conv(ONES, bias=tensor("b", (3,), "int32", 0.25, data=[1, 2, 3])),
        conv(ONES, bias=tensor("b", (3,), "int32", 0.5, data=[1, 2, 3])),
        "'b' with a different scale",
    ),
    (
        rules.bias({"float32"}, SOURCE, cure="c"),
        conv(ONES, bias=tensor("b", (3,), "float32", None, data=[1, 2, 3])),
        conv(ONES, bias=tensor("b", (3,), "int32", 0.25, data=[1, 2, 3])),
        "'b' of int32",
    ),
    (
        rules.power_of_two(SOURCE, cure="c"),
        operator(tensor(scale=0.125)),
        operator(tensor(scale=0.3)),
        "'x': scale 0.3, zero point 0",
    ),
    (
        rules.fixed_grid({"Op"}, "uint16", 2**-16, 0, SOURCE),
        operator(outputs=[tensor("y", dtype="uint16", scale=2**-16)]),
        operator(outputs=[tensor("y", dtype="uint16", scale=2**-15)]),
        "'y' with scale 3.05176e-05, zero point 0",
    ),
    (
        rules.same_grid({"Op"}, SOURCE, cure="c"),
        operator(tensor(), tensor("z"), outputs=[tensor("y", scale=9)]),
        operator(tensor(), tensor("z", zero=1)),
        "'x' with scale 0.5, zero point 0, 'z' with scale 0.5, zero point 1",
    ),
    (
        rules.same_grid({"Op"}, SOURCE, cure="c", outputs=True),
        operator(tensor(), outputs=[tensor("y")]),
        operator(tensor(), outputs=[tensor("y", scale=9)]),
        "'x' with scale 0.5, zero point 0, 'y' with scale 9, zero point 0",
    ),
    (
        rules.narrow_second({"Op"}, SOURCE, cure="c"),
        operator(tensor(dtype="uint16"), tensor("z", dtype="uint8")),
        operator(tensor(dtype="uint16"), tensor("z", dtype="uint16")),
        "'z' of uint16",
    ),
    (rules.rank(4, SOURCE), operator(tensor()), operator(tensor(shape=(1, 2, 3, 4, 5))), "'x' of shape 1x2x3x4x5"),
    (
        rules.rank(2, SOURCE, used=True),
        operator(tensor(shape=(1, 1, 3, 4))),
        operator(tensor(shape=(1, 2, 3, 4))),
        "'x' of shape 1x2x3x4",
    ),
    (rules.dimensions(8, SOURCE), operator(tensor()), operator(tensor(shape=(1, 9))), "'x' of shape 1x9"),
    (rules.batch_of_one(SOURCE), operator(tensor()), operator(tensor(shape=(2, 4, 4, 2))), "'x' of shape 2x4x4x2"),
    (rules.innermost(3, SOURCE), operator(tensor()), operator(tensor(shape=(2, 4, 4, 2))), "'x' of shape 2x4x4x2"),
    (rules.static(SOURCE), operator(tensor(shape=(None, 4))), operator(tensor(shape=(1, None))), "'x' of shape 1x?"),
    (
        rules.window({"CONV_2D"}, "e", SOURCE, lambda w, _: max(w.strides) <= 3 and w.height <= 3, cure="c"),
        conv(ONES),
        conv(ONES, stride_w=4),
        "a kernel of 3x3 (dilated by 1x1), strides 1x4",
    ),
    (
        rules.window({"CONV_2D"}, "e", SOURCE, lambda w, _: w.height <= 3, cure="c"),
        conv(ONES),
        conv(ONES, dilation_h=2, dilation_w=1),
        "a kernel of 5x3 (dilated by 2x1), strides 1x1",
    ),
    (rules.weight_sum({"CONV_2D"}, 18, SOURCE), conv(ONES), conv(ONES * 2), "36 in 'w'"),
    (rules.floats_between(SOURCE), operator(tensor()), operator(tensor(), on_codes=True), "an operator on codes"),
]


@pytest.mark.parametrize(("rule", "fine", "broken", "came"), CASES, ids=range(len(CASES)))
def test_a_rule(rule, fine, broken, came):
    assert rule.came(fine) is None
    assert rule.came(broken) == came
    assert rule.expected
    assert rule.cure


def test_a_window_of_onnx():
    rule = rules.window({"MaxPool"}, "e", SOURCE, lambda w, _: w.width == 2 and not w.padded, cure="c")
    pool = operator(tensor(), name="MaxPool", options={"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4})
    assert rule.came(pool) is None
    padded = operator(tensor(), name="MaxPool", options={"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]})
    assert rule.came(padded) == "a kernel of 2x2 (dilated by 1x1), strides 1x1"


def test_an_operator_that_no_rule_states_is_a_violation():
    for name in profiles.names():
        verdict = profiles.check_operators(profiles.get(name), [operator(tensor(), name="Mystery")])
        (violation,) = verdict.violations
        assert violation.came.startswith("Mystery, not known for this device")
        assert violation.location == "file.py:1"


def test_every_profile_says_where_its_rules_stand():
    for name in profiles.names():
        profile = profiles.get(name)
        assert profile.proof
        assert profile.otherwise
        assert profile.targets
        for source in profile.sources:
            assert source.url.startswith("https://"), (name, source)
        assert not list(profile.scheme.weights.wrong(profile.weights)), name
        assert not list(profile.scheme.activations.wrong(profile.activations)), name


def test_the_page_is_that_of_the_data():
    own = [name for name in profiles.names() if not name.endswith("of_this_test")]
    page = (Path(__file__).parents[3] / "docs" / "profiles.md").read_text(encoding="utf-8")
    begin, end = "<!-- profiles -->\n", "\n<!-- end -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == markdown(own)
