"""The attributes of nodes: every operation states them, and a graph with others is refused."""

from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest

from qjax import ops
from qjax.graph.check import GraphError, check_integer, check_quantized
from qjax.graph.ir import Graph, Node, Tensor
from qjax.ops.base import Elementwise, Role, register
from qjax.ops.fields import OfTarget, fits, plain, problem


class Example(TypedDict):
    axis: int
    shape: list[int | None]
    function: Literal["max", "min"]
    scale: NotRequired[float]


class Prepared(TypedDict):
    places: int


GOOD: dict[str, Any] = {"axis": 1, "shape": [None, 3], "function": "max"}


def test_what_is_stated_is_taken():
    assert problem((Example,), GOOD) is None
    assert problem((Example,), {**GOOD, "scale": 2}) is None
    assert problem((Example, OfTarget), {**GOOD, "rule": "single"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": 1}, "has no attribute 'axes'. Did you mean 'axis'? Its attributes: axis, function, scale, shape."),
        ({"axis": True}, "attribute 'axis': expected integer, got True."),
        ({"axis": 1.0}, "attribute 'axis': expected integer, got 1.0."),
        ({"axis": None}, "attribute 'axis': expected integer, got None."),
        ({"shape": 3}, "attribute 'shape': expected a list of integer or null, got 3."),
        ({"shape": [3, "4"]}, "attribute 'shape': expected a list of integer or null, got [3, '4']."),
        ({"function": "mean"}, "attribute 'function': expected one of 'max', 'min', got 'mean'."),
        ({"scale": "2"}, "attribute 'scale': expected number, got '2'."),
        ({"rule": "single"}, "has no attribute 'rule'. Its attributes: axis, function, scale, shape."),
    ],
)
def test_anything_else_is_a_problem(changed: dict[str, Any], message: str):
    assert problem((Example,), {**GOOD, **changed}) == message


@pytest.mark.parametrize("name", ["axis", "shape", "function"])
def test_what_must_be_there(name: str):
    given = {key: value for key, value in GOOD.items() if key != name}
    found = problem((Example,), given)
    assert found is not None
    assert found.startswith(f"lacks the attribute {name!r}, ")


def test_json_does_not_tell_a_number_from_an_integer():
    assert fits(3, float)
    assert not fits(True, float)
    assert not fits(3.0, int)


def test_an_operation_without_stated_attributes_is_not_registered():
    class Forgotten(Elementwise):
        name = "forgotten"
        role = Role.GRID

    with pytest.raises(TypeError, match="does not state fields"):
        register(Forgotten)
    assert "forgotten" not in ops.names()


def moving(attributes: dict[str, Any]) -> Graph:
    tensors = {name: Tensor(name, (None, 4), "int32") for name in ("x", "y")}
    return Graph(tensors, (Node("y", "reverse", ("x",), "y", {}, attributes),), ("x",), ("y",), "")


def test_both_stages_of_a_graph_are_checked():
    right, wrong = moving({"axes": [1]}), moving({"axes": "1"})
    assert check_quantized(right) is right
    assert check_integer(right) is right
    for check in (check_quantized, check_integer):
        with pytest.raises(GraphError, match=r"Node 'y': 'reverse' attribute 'axes': expected a list of integer"):
            check(wrong)
        with pytest.raises(GraphError, match="Node 'y': 'reverse' lacks the attribute 'axes'"):
            check(moving({}))


def test_numbers_of_numpy_become_those_of_json():
    found = plain({"axis": np.int64(1)}["axis"]), plain((np.int32(2), [np.bool_(True), np.float32(0.5)])), plain("a")
    assert found == (1, [2, [True, 0.5]], "a")
    assert [type(found[0]), type(found[1][0]), type(found[1][1][0])] == [int, int, bool]


def test_what_a_target_prepares_may_be_there_in_a_quantized_graph():
    assert problem((Example,), {**GOOD, "places": 3}, (Prepared,)) is None
    assert problem((Example,), GOOD, (Prepared,)) is None
    assert problem((Example,), {**GOOD, "places": "3"}, (Prepared,)) == "attribute 'places': expected integer, got '3'."
