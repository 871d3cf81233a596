"""The structure of a model's output as JSON values."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.export.structure import describe, rebuild

TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def relabelled(tree):
    if isinstance(tree, int):
        return f"leaf {tree}"
    if isinstance(tree, dict):
        return {key: relabelled(value) for key, value in tree.items()}
    return type(tree)(relabelled(value) for value in tree)


@given(TREES)
def test_a_structure_survives_json(tree):
    described = json.loads(json.dumps(describe(tree)))
    leaves = [f"leaf {i}" for i in range(10)]
    rebuilt = rebuild(described, leaves)
    assert rebuilt == relabelled(tree)
    assert repr(rebuilt) == repr(relabelled(tree))


@pytest.mark.parametrize("tree", [None, True, 1.5, "x", {1, 2}, np.zeros(2), [0, None]])
def test_other_nodes_are_refused(tree):
    with pytest.raises(TypeError, match="a graph can return arrays in dicts, lists and tuples"):
        describe(tree)
