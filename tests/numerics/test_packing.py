"""Many small arrays as one vector and back: values, gradients, and the size of the program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.packing import packed, unpacked

SHAPES = {
    "one": [()],
    "few scalars": [()] * 5,
    "scalars, a round and one": [()] * 9,
    "scalars, two rounds and a rest": [()] * 75,
    "sizes mixed": [(), (3,), (3,), (2, 2), (), (0,), (5, 1)],
    "runs": [()] * 20 + [(1, 4)] * 11 + [(4,)] * 3 + [(2, 3, 4)] * 9,
}


def arrays_of(shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name: str) -> None:
    arrays = arrays_of(SHAPES[name])
    expected = np.concatenate([np.ravel(a) for a in arrays])

    def both(arrays: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        vector = packed(arrays)
        return vector, unpacked(vector, SHAPES[name])

    for run in (both, jax.jit(both)):
        vector, back = run(arrays)
        np.testing.assert_array_equal(vector, expected)
        for a, b in zip(arrays, back, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.sampled(2)
def test_each_gradient_is_the_others_value(name: str) -> None:
    arrays = arrays_of(SHAPES[name])
    vector, pull = jax.vjp(packed, arrays)
    (back,) = jax.jit(pull)(2 * vector)
    for a, b in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(2 * a, b, strict=True)
    _, pull = jax.vjp(lambda v: unpacked(v, SHAPES[name]), vector)
    (back,) = jax.jit(pull)([3 * a for a in arrays])
    np.testing.assert_array_equal(3 * vector, back)


def test_under_vmap() -> None:
    shapes = SHAPES["runs"]
    rows = jnp.stack([packed(arrays_of(shapes)), -packed(arrays_of(shapes))])
    many = jax.jit(jax.vmap(lambda v: unpacked(v, shapes)))(rows)
    for a, b in zip(arrays_of(shapes), many, strict=True):
        np.testing.assert_array_equal(b, jnp.stack([a, -a]))


@pytest.mark.usefixtures("on_cpu")
def test_pieces_of_one_size_are_one_kernel() -> None:
    """Kernels of one text are compiled once: no offset may be part of it."""
    count = 500
    program = jax.jit(lambda v: [jnp.sin(a) for a in unpacked(v, [()] * count)])
    text = program.lower(jnp.ones(count)).compile().as_text()
    assert text is not None
    assert len(re.findall(r" dynamic-slice\(", text)) >= count
    assert not re.findall(r" slice\(", text)
