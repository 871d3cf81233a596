"""Constants that several nodes hold are one argument of the compiled function."""

import jax
import numpy as np

from qjax.run.shared_constants import SharedConstants


def test_equal_arrays_are_one_leaf():
    a = np.arange(6, dtype=np.int8)
    constants = {
        "first": {"kernel": a, "shift": np.int32(3)},
        "second": {"kernel": a, "shift": np.asarray(3, np.int32)},
        "third": {"kernel": a.copy(), "shift": np.asarray(3, np.int8), "row": a.reshape(1, 6)},
    }
    shared = SharedConstants.of(constants)
    leaves = jax.tree.leaves(shared)
    # dtype and shape are part of what is equal
    assert len(leaves) == 4
    assert list(shared) == ["first", "second", "third"]
    for node, roles in constants.items():
        assert set(shared[node]) == set(roles)
        for role, value in roles.items():
            assert np.array_equal(shared[node][role], value)
            assert np.asarray(shared[node][role]).dtype == value.dtype
    assert shared["first"]["kernel"] is shared["third"]["kernel"]


def test_it_passes_through_jit():
    constants = {"a": {"x": np.float32(2)}, "b": {"x": np.float32(2), "y": np.int32(5)}}
    shared = jax.device_put(SharedConstants.of(constants))
    doubled = jax.jit(lambda c: jax.tree.map(lambda v: v + v, c))(shared)
    assert isinstance(doubled, SharedConstants)
    assert (float(doubled["b"]["x"]), int(doubled["b"]["y"])) == (4.0, 10)
    # the same object of places: what was compiled for one set of values serves another
    assert jax.tree.structure(doubled) == jax.tree.structure(shared)
