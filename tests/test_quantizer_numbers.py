"""The vectors that hold the numbers of all quantizers, and what they say of one."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import Override, QSpec, Recipe
from qjax.calibration.estimators import LSQ
from qjax.calibration.learned import with_scales

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
RECIPE = Recipe(
    weights=QSpec(bits=4, axis=-1),
    overrides={"input": Override(method="static"), "second": Override(method="lsq_plus")},
)


class Net(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first, self.second = nnx.Linear(5, 7, rngs=rngs), nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


@pytest.fixture
def qmodel() -> qjax.QuantizedModel:
    return qjax.quantize(Net(), RECIPE, X)


def test_one_variable_for_each_kind(qmodel: Any) -> None:
    shapes = {path[0]: np.shape(value[...]) for path, value in nnx.to_flat_state(nnx.state(qmodel.quantizers))}
    # the input; two tensors and their weights per channel, of which the second ones learn a zero point
    assert shapes == {
        "learned_log2_scale": (1 + 7 + 1 + 3,),
        "learned_zero_point": (1 + 3,),
        "scale": (1,),
        "zero_point": (1 + 1 + 7,),
    }
    kinds = {type(value) for _, value in nnx.to_flat_state(nnx.state(qmodel.quantizers, nnx.Param))}
    assert kinds == {qjax.QuantParam}
    assert list(qmodel.quantizers) == [name for name, _ in qmodel.plan.quantizers]


def test_one_quantizer_by_name(qmodel: Any) -> None:
    one = qmodel.quantizers["first/kernel"]
    assert one.log2_scale.shape == (7,)
    assert copy.copy(one).log2_scale.shape == (7,)
    others = {name: numbers for name, numbers in qmodel.quantizers.named().items() if name != "first/kernel"}
    one.log2_scale[...] = jnp.arange(7.0)
    one.log2_scale[(2,)] = jnp.float32(9)
    np.testing.assert_array_equal(one.log2_scale[...], [0, 1, 9, 3, 4, 5, 6])
    np.testing.assert_array_equal(qmodel.qparams()["first/kernel"].scale, 2.0 ** np.array([0, 1, 9, 3, 4, 5, 6]))
    after = qmodel.quantizers.named()
    for name, numbers in others.items():
        assert all(np.array_equal(after[name][key], value) for key, value in numbers.items())


def test_scales_are_those_of_each_quantizer_alone(qmodel: Any) -> None:
    quantizers, named = qmodel.plan.by_name, qmodel.quantizers.named()
    ready = nnx.jit(lambda q: q.quantizers.ready(q.plan.by_name))(qmodel)
    for name, quantizer in quantizers.items():
        alone = with_scales({name: quantizer}, {name: named[name]})[name]
        assert set(ready[name]) == set(alone)
        assert all(np.array_equal(ready[name][key], value) for key, value in alone.items())


@pytest.mark.exhaustive
def test_gradients_by_name(qmodel: Any) -> None:
    gradients = nnx.grad(lambda q: (q(X) ** 2).sum())(qmodel)
    named = qmodel.quantizers.named(gradients["quantizers"])
    assert named["input"] == {}
    assert np.shape(named["first/kernel"]["log2_scale"]) == (7,)
    assert set(named["second"]) == {"log2_scale", "zero_point"}
    vector = gradients["quantizers"]["learned_log2_scale"][...]
    parts = [numbers["log2_scale"] for numbers in named.values() if "log2_scale" in numbers]
    assert sorted(np.concatenate([np.ravel(part) for part in parts])) == sorted(np.asarray(vector))
    assert np.any(vector != 0)


def test_writes_under_jit_are_those_of_the_host(qmodel: Any) -> None:
    values = {"first/kernel": {"log2_scale": np.arange(7, dtype=np.float32)}, "input": {"scale": np.float32(3)}}
    inside, outside = nnx.clone(qmodel), nnx.clone(qmodel)
    nnx.jit(lambda q: q.quantizers.write(values))(inside)
    outside.quantizers.write(values)
    a, b = (jax.tree.leaves(nnx.state(each.quantizers)) for each in (inside, outside))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_mistakes_are_named(qmodel: Any) -> None:
    with pytest.raises(KeyError, match="No quantizer 'third'; there are input"):
        qmodel.quantizers["third"]
    with pytest.raises(AttributeError, match="Quantizer 'input' has no 'log2_scale'; it has scale, zero_point"):
        _ = qmodel.quantizers["input"].log2_scale
    with pytest.raises(ValueError, match=r"Quantizer 'first/kernel': expected numbers of shape \(7,\), got \(\)"):
        qmodel.quantizers["first/kernel"].log2_scale[...] = 0.5


class Taken(LSQ):
    """Calls a number as a method of the vectors is called."""

    name = "taken"

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        return {**super().init(spec, scale, zero_point), "write": scale}


def test_a_name_that_is_taken() -> None:
    with pytest.raises(ValueError, match="its estimator calls a number 'write', a name that is taken"):
        qjax.quantize(Net(), Recipe(method=Taken()), X)


@pytest.mark.exhaustive
def test_equal_models_have_equal_structures() -> None:
    a, b = (qjax.quantize(Net(seed), RECIPE, X) for seed in (0, 1))
    assert nnx.graphdef(a.quantizers) == nnx.graphdef(b.quantizers)
    assert hash(nnx.graphdef(a.quantizers)) == hash(nnx.graphdef(b.quantizers))
    other = qjax.quantize(Net(), Recipe(), X)
    assert nnx.graphdef(other.quantizers) != nnx.graphdef(a.quantizers)
    assert len(str(a.quantizers)) < 2000
