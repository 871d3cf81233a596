"""An estimator of one's own trains, converts and verifies as the built-in ones do."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.calibration import LSQ, Estimator, estimator, estimators
from qjax.numerics import gradients
from qjax.numerics.fake_quant import fake_quant

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own-training.md"
X = np.random.default_rng(0).uniform(-1, 1, (16, 4)).astype(np.float32)


def of_the_page() -> Any:
    """The class that docs/own-training.md shows."""
    section = PAGE.read_text().partition("## A gradient estimator of your own")[2]
    block = re.search(r"```python\n(.*?)```", section, flags=re.S)
    assert block is not None
    names: dict[str, Any] = {"qjax": qjax}
    exec(block.group(1), names)
    return names


@pytest.mark.exhaustive
def test_the_example_of_the_page_trains_and_converts_exactly() -> None:
    names = of_the_page()
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 3, rngs=rngs))
    qmodel = qjax.quantize(model, names["recipe"], X)
    before = {name: float(np.asarray(q.scale).ravel()[0]) for name, q in qmodel.qparams().items()}

    @nnx.jit
    def step(qmodel: Any, x: Any) -> None:
        slopes = nnx.grad(lambda q: jnp.sum(jnp.square(q(x) - 1)))(qmodel)
        nnx.update(qmodel, jax.tree.map(lambda p, g: p - 0.05 * g, nnx.state(qmodel, nnx.Param), slopes))

    for _ in range(3):
        step(qmodel, X)
    after = {name: float(np.asarray(q.scale).ravel()[0]) for name, q in qmodel.qparams().items()}
    assert all(before[name] != after[name] for name in before)
    assert "magnitude_aware" in qmodel.summary()
    qmodel.eval()
    graph = qjax.convert(qmodel, X)
    assert np.array_equal(graph(X), qjax.exact(qmodel, X)(qmodel, X))


@pytest.mark.exhaustive
def test_a_function_is_a_gradient() -> None:
    x = jnp.asarray([-4.0, -0.3, 0.26, 5.0], jnp.float32)
    qparams = qjax.QParams(jnp.float32(0.5), jnp.int32(0), qjax.QSpec(bits=3))

    def sum_of(gradient: Any) -> Any:
        return jax.grad(lambda x, q: jnp.sum(fake_quant(x, q, gradient=gradient)), (0, 1), allow_int=True)(x, qparams)

    for name, rule in gradients.GRADIENTS.items():
        assert all(map(np.array_equal, jax.tree.leaves(sum_of(name)), jax.tree.leaves(sum_of(rule))))
    slopes, _ = sum_of(of_the_page()["MagnitudeAware"]().gradient)
    # codes -3..3 (narrow): bounds of 1.5
    assert np.array_equal(slopes, np.asarray([np.float32(1.5) / 4, 1, 1, np.float32(1.5) / 5], np.float32))


def test_the_state_of_another_estimator_is_refused() -> None:
    own = of_the_page()["MagnitudeAware"]
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    first, second = (qjax.quantize(model, qjax.Recipe(weight_method=method), X) for method in (own(), "lsq"))
    with pytest.raises(ValueError, match="method 'lsq' in the model, an estimator of its own"):
        nnx.update(second, nnx.state(first))


class Silent(Estimator):
    """Forgets its gradient."""

    name = "silent"

    def init(self, spec: Any, scale: Any, zero_point: Any) -> Any:
        return {}

    def qparams(self, spec: Any, params: Any, x: Any = None) -> Any:
        raise NotImplementedError


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"abstract.*gradient"):
        Silent()  # pyright: ignore[reportAbstractUsage]
    with pytest.raises(ValueError, match=r"Unknown method 'lsqq'.*Did you mean 'lsq'"):
        estimator("lsqq")
    with pytest.raises(TypeError, match="make an instance of it"):
        estimator(LSQ)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Got 'soft'\. It may be a function"):
        gradients.rule_of("soft")


def test_the_built_in_methods_keep_their_places() -> None:
    """Checkpoints hold the place of a method in this list."""
    assert estimators() == ("lsq", "lsq_plus", "pact", "tqt", "static", "dynamic", "absmean")


@pytest.mark.parametrize("method", ["lsq", "tqt"])
def test_a_channel_too_small_to_learn_counts_as_zeros(method: str) -> None:
    """2^-64 is the least scale that learns; below 2^-100 `choose_qparams` has put 1 already."""
    spec, zero = qjax.QSpec(axis=-1), np.zeros(3, np.int32)
    for size in (2.0**-65, 1e-24, 2.0**-100):
        params = estimator(method).init(spec, np.array([0.5, size, 2.0**-64], np.float32), zero)
        scale = np.asarray(estimator(method).qparams(spec, params).scale)
        assert np.array_equal(scale, np.array([0.5, 1, 2.0**-64], np.float32))
        with pytest.raises(ValueError, match=r"scale must lie in \[2\^-64, 2\^64\]"):
            estimator(method).init(spec, np.full(3, size, np.float32), zero)


def test_a_clipping_value_that_pact_cannot_hold_is_refused() -> None:
    spec = qjax.QSpec(bits=4, signed=False, symmetric=False)
    with pytest.raises(ValueError, match="scale must lie in"):
        estimator("pact").init(spec, np.asarray(1e-24, np.float32), np.asarray(0, np.int32))
