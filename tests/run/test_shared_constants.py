"""Constants that several nodes hold are one argument of the compiled function."""

import jax
import numpy as np
from jax.sharding import AxisType

from qjax.numerics.meshes import automatic, explicit_mesh
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


def test_stacks_on_a_mesh_with_explicit_axes():
    """Constants that come from parameters on such a mesh have the types of its automatic view."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        with automatic(explicit_mesh(())):
            values = [jax.jit(lambda x: x + 1)(np.full(2, i, np.int8)) for i in range(2)]
        shared = SharedConstants.of({"a": {"kernel": values[0]}, "b": {"kernel": values[1]}}, [("a", "b")])
    assert np.array_equal(shared.over(["a", "b"])[1]["kernel"], [[1, 1], [2, 2]])
