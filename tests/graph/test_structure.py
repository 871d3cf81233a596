"""The structure of a model's output as JSON values."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.graph.structure import describe, rebuild

TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.none(),
    ),
    max_leaves=8,
)


def relabelled(tree):
    if tree is None:
        return None
    if isinstance(tree, int):
        return f"leaf {tree}"
    if isinstance(tree, dict):
        return {key: relabelled(value) for key, value in tree.items()}
    return type(tree)(relabelled(value) for value in tree)


@pytest.mark.exhaustive
@given(TREES)
def test_a_structure_survives_json(tree):
    described = json.loads(json.dumps(describe(tree)))
    leaves = [f"leaf {i}" for i in range(10)]
    rebuilt = rebuild(described, leaves)
    assert rebuilt == relabelled(tree)
    assert repr(rebuilt) == repr(relabelled(tree))


@pytest.mark.parametrize("tree", [True, 1.5, "x", {1, 2}, [0, 1.5]])
def test_other_leaves_are_refused(tree):
    with pytest.raises(TypeError, match="a graph can return arrays and trees of them"):
        describe(tree)


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -0.0, np.nan]], np.float32),
        np.array([1, -2], np.int32),
        np.array(True),
        np.zeros((0, 2), np.float32),
    ],
    ids=["floats", "integers", "scalar", "empty"],
)
def test_a_constant_survives_json(array):
    array = np.asarray(array)
    (found,) = rebuild(json.loads(json.dumps(describe((array,)))), [])
    assert found.shape == array.shape
    assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")
