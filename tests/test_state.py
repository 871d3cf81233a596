"""A state is restored into a model of its own plan only; models and graphs can be pickled and copied."""

import copy
import functools
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import qjax
from qjax import Override, QSpec, Recipe

X = np.asarray(np.random.default_rng(0).normal(size=(8, 6)), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.body(x)))


OTHERS: dict[str, tuple[Recipe, str]] = {
    "bits of weights": (
        Recipe(weights=QSpec(bits=4, axis=-1)),
        "'body/kernel': 4 bits in the model, 8 bits in the state; 'head/kernel': 4 bits in the model, 8 bits in",
    ),
    "bits of one activation": (
        Recipe(overrides={"head": Override(activations=QSpec(bits=6, symmetric=False))}),
        "'head': 6 bits in the model, 8 bits in the state",
    ),
    "signs": (
        Recipe(activations=QSpec(symmetric=False, signed=False)),
        "'input': not signed in the model, signed in the state",
    ),
    "symmetry": (
        Recipe(activations=QSpec()),
        "'input': symmetric in the model, not symmetric in the state; "
        "'input': narrow_range in the model, not narrow_range in the state",
    ),
    "axes": (
        Recipe(weights=QSpec(bits=8, axis=1, group_size=2, group_axis=0)),
        "'body/kernel': scales along other axes .* in the model, scales along other axes .* in the state",
    ),
    "method": (
        Recipe(weight_method="tqt"),
        "'body/kernel': method 'tqt' in the model, method 'lsq' in the state",
    ),
}


@functools.cache
def quantized() -> Any:
    return qjax.quantize(Net(nnx.Rngs(0)), Recipe(), X)


@functools.cache
def with_float_head() -> Any:
    return qjax.quantize(Net(nnx.Rngs(0)), Recipe(overrides={"head": qjax.FLOAT}), X)


def fresh() -> Any:
    return nnx.clone(quantized())


def of(name: str) -> Any:
    return nnx.clone(quantized_other(name))


@functools.cache
def quantized_other(name: str) -> Any:
    return qjax.quantize(Net(nnx.Rngs(0)), OTHERS[name][0], X)


def by_update(qmodel: Any, state: Any, folder: pathlib.Path) -> None:
    nnx.update(qmodel, state)


def by_orbax(qmodel: Any, state: Any, folder: pathlib.Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(qmodel))
        nnx.update(qmodel, checkpointer.restore(folder / "state", abstract))


def by_numbers(qmodel: Any, state: Any, folder: pathlib.Path) -> None:
    """Numbers without their variables are compared when the model is used."""
    nnx.update(qmodel, nnx.to_pure_dict(state))
    qmodel(X)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "method"])
def test_a_state_of_another_plan_is_refused_and_the_first_differences_are_named(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"with other quantizers: {OTHERS[name][1]}.*Quantize the model with the recipe"
    ):
        by_update(of(name), nnx.state(quantized()), pathlib.Path())


def test_another_method_has_other_numbers_and_is_named_too() -> None:
    with pytest.raises(ValueError, match=OTHERS["method"][1]):
        of("method").fingerprint.update_from_state(nnx.state(quantized())["fingerprint"])


@pytest.mark.parametrize("restore", [by_update, by_orbax, by_numbers])
def test_however_it_is_restored(restore: Callable[..., None], tmp_path: pathlib.Path) -> None:
    trained = fresh()
    trained.model.head.bias[...] = trained.model.head.bias[...] + 1
    with pytest.raises(ValueError, match="'body/kernel': 4 bits in the model, 8 bits in the state"):
        restore(of("bits of weights"), nnx.state(trained), tmp_path / "other")
    same = fresh()
    restore(same, nnx.state(trained), tmp_path / "same")
    assert np.array_equal(np.asarray(same(X)), np.asarray(trained(X)))


def test_every_use_outside_of_jit_compares() -> None:
    wrong = of("bits of weights")
    wrong.fingerprint.set_raw_value(quantized().fingerprint.get_raw_value())
    uses: list[Callable[[], Any]] = [
        lambda: wrong(X),
        lambda: wrong.codes(X),
        lambda: wrong.summary(),
        lambda: wrong.qparams(),
        lambda: qjax.convert(wrong, X),
        lambda: qjax.exact(wrong, X),
        lambda: qjax.calibrate(wrong, [X]),
        lambda: qjax.statistics(wrong, [X]),
        lambda: qjax.sensitivity(wrong, [X]),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="'body/kernel': 4 bits in the model, 8 bits in the state"):
            use()


def test_a_donated_model_takes_the_state_that_its_step_returns() -> None:
    """The loop of flax's gemma: `jax.jit` donates model and optimizer, and `nnx.update` writes back what it returns."""
    qmodel = qjax.quantize(Net(nnx.Rngs(0)), Recipe(), X)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(0.1), wrt=nnx.Param)

    @functools.partial(jax.jit, donate_argnames=("qmodel", "optimizer"))
    def step(qmodel: Any, optimizer: Any, x: Any) -> Any:
        graphdef, params, rest = nnx.split(qmodel, nnx.Param, ...)
        grads = jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params, rest)(x) ** 2))(params)
        optimizer.update(qmodel, grads)
        return nnx.state((qmodel, optimizer))

    model: Any = qmodel.model
    before = np.asarray(model.head.kernel[...])
    for _ in range(2):
        nnx.update((qmodel, optimizer), step(qmodel, optimizer, X))
    assert not np.array_equal(model.head.kernel[...], before)
    assert qmodel(X).shape == (8, 4)
    other = qjax.quantize(Net(nnx.Rngs(0)), OTHERS["bits of weights"][0], X)
    with pytest.raises(ValueError, match=OTHERS["bits of weights"][1]):
        nnx.update(other, nnx.state(qmodel))


def test_quantizers_that_the_state_lacks_or_has_beyond_the_models() -> None:
    few: Any = with_float_head()
    few.fingerprint.set_raw_value(quantized().fingerprint.get_raw_value())
    with pytest.raises(ValueError, match="the state has 2 quantizers that the model lacks"):
        few.check_state()
    many = nnx.clone(quantized())
    many.fingerprint.set_raw_value(with_float_head().plan.fingerprint)
    with pytest.raises(ValueError, match="'head/kernel' is not in the state"):
        many.check_state()


@pytest.mark.exhaustive
def test_transforms_optimizers_and_steps_leave_it_alone() -> None:
    qmodel = fresh()
    optimizer = nnx.Optimizer(qmodel, optax.sgd(1e-3), wrt=nnx.Param)
    before = np.asarray(qmodel.fingerprint.get_raw_value())

    @nnx.jit
    def step(qmodel: Any, optimizer: Any) -> None:
        optimizer.update(qmodel, nnx.grad(lambda q: jnp.sum(q(X)))(qmodel))

    step(qmodel, optimizer)
    step(qmodel, optimizer)
    assert np.array_equal(np.asarray(qmodel.fingerprint.get_raw_value()), before)
    assert all("fingerprint" not in path for path, _ in nnx.to_flat_state(nnx.state((qmodel, optimizer), nnx.Param)))
    qmodel(X)
    definition, state = nnx.split(qmodel)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), state)
    found = jax.vmap(lambda s: nnx.merge(definition, s)(X))(two)
    assert np.array_equal(np.asarray(found[0]), np.asarray(jax.jit(lambda s: nnx.merge(definition, s)(X))(state)))


def test_a_state_from_before_the_fingerprint_is_taken_as_it_is() -> None:
    """It says nothing of its plan; docs/distributed.md shows how to restore one."""
    trained = fresh()
    qmodel = fresh()
    trained.model.head.bias[...] = trained.model.head.bias[...] + 1
    nnx.update(qmodel, nnx.state(trained, nnx.Not(qjax.QuantPlan)))
    assert np.array_equal(np.asarray(qmodel(X)), np.asarray(trained(X)))


# ---------------------------------------------------------------------------- pickle and copies


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_a_model_and_a_graph_are_pickled_and_copied(copied: Callable[[Any], Any]) -> None:
    qmodel = quantized()
    other = copied(qmodel)
    assert np.array_equal(np.asarray(other(X)), np.asarray(qmodel(X)))
    assert isinstance(other.model, Net)
    assert other.summary() == qmodel.summary()
    graph = qjax.convert(other, X)
    assert np.array_equal(np.asarray(copied(graph)(X)), np.asarray(qjax.convert(qmodel, X)(X)))
