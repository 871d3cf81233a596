"""Keys of calls: what differs in anything but a name is another call."""

import dataclasses

import numpy as np
import pytest

from qjax.export.emit.onnx.nodes import key_of
from qjax.export.emit.onnx.views import View

VIEW = View("a", "int8", (2, 3), (2, 3), (0, 1), low=-4, high=7, known=np.arange(6, dtype=np.int8))


def test_names_of_views_do_not_count() -> None:
    assert key_of(VIEW) == key_of(dataclasses.replace(VIEW, name="b"))


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "uint8"},
        {"shape": (3, 2)},
        {"axes": (1, 0)},
        {"low": None},
        {"held": "float64"},
        {"known": None},
        {"known": np.arange(6, dtype=np.int16)},
        {"known": np.arange(6, dtype=np.int8).reshape(2, 3)},
        {"known": np.zeros(6, np.int8)},
    ],
)
def test_everything_else_does(changed) -> None:
    assert key_of(VIEW) != key_of(dataclasses.replace(VIEW, **changed))


def test_kinds_that_python_calls_equal_are_told_apart() -> None:
    values = [1, 1.0, True, "1", (1,), [1], {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, None, np.int32(1)]
    assert len({key_of(value) for value in values}) == len(values)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected a field of a call, got object"):
        key_of({"a": [object()]})
