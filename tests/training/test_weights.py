"""A weight's codes without a forward pass are those of the forward pass, and stay where they are put."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.support.batches import arguments_of
from tests.analysis.models import Deep, Small, coarse, data


class Odd(nnx.Module):
    """A square weight read as it stands and one that is read transposed; no bias anywhere."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.second = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x):
        return (x @ self.first[...]) @ self.second[...].T


def seen_by_the_forward(qmodel, x):
    """Name -> centred codes that the forward multiplies with."""

    def codes(place, _, quantized):
        return quantized.codes if place.kind == "weight" else None

    return qmodel.trace(*arguments_of(x)).evaluate(record=codes).recorded


@pytest.fixture(scope="module")
def small():
    return qjax.quantize(Small(), coarse(3), data(8, 4))


@pytest.mark.exhaustive
def test_codes_are_those_of_the_forward(small):
    weights = qjax.training.weights_of(small, data(8, 4))
    assert weights.names == ("first/kernel", "middle/kernel", "last/kernel")
    assert weights.left == ()
    seen = seen_by_the_forward(small, data(8, 4))
    for name, codes in qjax.training.codes_of(small, weights.names).items():
        assert codes.dtype == jnp.int32
        assert np.array_equal(codes, seen[name])
        assert len(np.unique(codes)) > 3


def test_what_is_no_parameter_as_it_stands_is_left():
    odd = qjax.training.weights_of(qjax.quantize(Odd(), coarse(3), data(8, 4)), data(8, 4))
    assert odd.names == ("first",)
    assert [name for name, _ in odd.left] == ["second"]
    assert "computes it" in odd.left[0][1]
    deep = qjax.training.weights_of(qjax.quantize(Deep(), coarse(3), data(8, 3)), data(8, 3))
    assert deep.names == ("stem/kernel", "head/kernel")
    assert dict(deep.left) == {"layers/kernel": "it is in a scan"}


@pytest.mark.exhaustive
def test_set_codes_stay_through_the_forward_and_the_conversion(small):
    qmodel = nnx.clone(small)
    rng = np.random.default_rng(0)
    wanted = {name: rng.integers(-3, 4, size=c.shape) for name, c in qjax.training.codes_of(qmodel, WEIGHTS).items()}
    qjax.training.set_codes(qmodel, wanted)
    seen = seen_by_the_forward(qmodel, data(8, 4))
    assert all(np.array_equal(seen[name], wanted[name]) for name in WEIGHTS)
    graph = qjax.convert(qmodel, data(8, 4))
    assert np.array_equal(qjax.exact(qmodel, data(8, 4))(qmodel, data(8, 4)), graph(data(8, 4)))
    stored = [c.value for c in graph.ir.constants() if c.shape == (4, 8)]
    assert any(np.array_equal(one, wanted["first/kernel"]) for one in stored)


WEIGHTS = ("first/kernel", "middle/kernel", "last/kernel")


@pytest.mark.exhaustive
def test_sixteen_bits_are_held_too():
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=16, axis=-1), activations=qjax.QSpec(bits=8, symmetric=False))
    qmodel = qjax.quantize(Small(), recipe, data(8, 4))
    rng = np.random.default_rng(0)
    wanted = {"first/kernel": rng.integers(-32767, 32768, size=(4, 8))}
    qjax.training.set_codes(qmodel, wanted)
    assert np.array_equal(qjax.training.codes_of(qmodel, ["first/kernel"])["first/kernel"], wanted["first/kernel"])


def test_errors_say_what_to_do(small):
    with pytest.raises(ValueError, match=r"weights_of\(qmodel, sample\)"):
        qjax.training.codes_of(small, ["nothing"])
    with pytest.raises(ValueError, match=r"shape \(4, 8\), got \(2,\)"):
        qjax.training.set_codes(small, {"first/kernel": np.zeros(2)})
    far = np.zeros((4, 8), int)
    far[1, 2] = 1000
    with pytest.raises(ValueError, match=r"'first/kernel': 1 codes lie beyond the grid of .* such as 1000"):
        qjax.training.set_codes(small, {"first/kernel": far})
