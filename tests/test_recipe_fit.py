"""What `quantize` says of a recipe that a model cannot take as it is: once, by name, before anything is calibrated.

Warnings are errors here. So a warning that is raised before the calibration ends the call, and costs no compilation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import FLOAT, Dynamic, Override, QSpec, Recipe, WeightFormat
from qjax.numerics.qspec import dividing_group
from tests.layers.dynamic_models import Stack, X, normal

FOUR = QSpec(bits=4, axis=-1, group_size=8)
ROWS = Dynamic(per="row")


def linear(a: int, b: int) -> nnx.Linear:
    return nnx.Linear(a, b, use_bias=False, rngs=nnx.Rngs(0))


class Parts(nnx.Module):
    """A table that is tied to the output, products over 8, 12 and 5 elements, and one over two axes."""

    def __init__(self) -> None:
        self.words = nnx.Embed(11, 8, rngs=nnx.Rngs(1))
        self.wide, self.narrow, self.odd = linear(8, 12), linear(12, 5), linear(5, 8)
        self.both = nnx.Param(jnp.asarray(normal(2, 4, 8)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.odd(nnx.relu(self.narrow(self.wide(self.words(tokens)))))
        y = jnp.einsum("bthe,hed->btd", x.reshape(*x.shape[:2], 2, 4), self.both[...])
        return self.words.attend(y)


TOKENS = np.arange(8, dtype=np.int32).reshape(2, 4)


class MLP(nnx.Module):
    def __init__(self) -> None:
        self.first, self.last = linear(8, 16), linear(16, 4)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def said(recipe: Recipe, model: Any = MLP, x: Any = X) -> str:
    """The first warning, which ends the call."""
    with pytest.raises(UserWarning) as found:
        qjax.quantize(model(), recipe, x)
    return str(found.value)


def refused(recipe: Recipe, model: Any = MLP, x: Any = X) -> str:
    with pytest.raises(ValueError, match=r"\w") as found:
        qjax.quantize(model(), recipe, x)
    return str(found.value)


# ---------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("size", "elements", "expected"),
    [(32, 64, 32), (32, 32, 32), (32, 48, 24), (32, 100, 25), (32, 74, None), (32, 4, None), (32, 20, None), (1, 5, 1)],
)
def test_the_greatest_divisor_that_is_at_least_half(size: int, elements: int, expected: int | None) -> None:
    assert dividing_group(size, elements) == expected


@pytest.mark.filterwarnings("ignore:quantize. only matrix products")
def test_each_weight_has_the_groups_that_it_can_have_and_converts() -> None:
    model = Parts()
    qmodel = qjax.quantize(model, Recipe(weights=FOUR, weight_observer="minmax"), TOKENS)
    scales = {
        name: np.asarray(q.scale) for name, q in qmodel.qparams().items() if qmodel.plan.by_name[name].spec.bits == 4
    }
    weights = {name: scale for name, scale in scales.items() if name in dict(qmodel.plan.details)}
    kernels = {name: np.asarray(getattr(model, name).kernel[...]) for name in ("wide", "narrow", "odd")}
    expected = {
        "words/embedding": np.abs(np.asarray(model.words.embedding[...])).max(),
        "wide/kernel": np.abs(kernels["wide"]).reshape(1, 8, 12).max(1),
        "narrow/kernel": np.abs(kernels["narrow"]).reshape(2, 6, 5).max(1),
        "odd/kernel": np.abs(kernels["odd"]).max(0),
        "both": np.abs(np.asarray(model.both[...])).max((0, 1)),
    }
    for name, largest in expected.items():
        assert weights[name].shape == np.shape(largest)
        np.testing.assert_array_equal(np.rint(largest / weights[name]), np.full(np.shape(largest), 7))
    (tied,) = set(weights) - set(expected)
    assert tied == "words/embedding#2"
    assert weights[tied].shape == (1, 11)
    report = qjax.verify(qjax.convert(qmodel, TOKENS), qmodel, [TOKENS])
    assert "No code differs" in str(report)


def test_one_warning_lists_all_that_have_other_scales() -> None:
    text = said(Recipe(weights=FOUR), Parts, TOKENS)
    for part in (
        "'words/embedding' (embed) per tensor",
        "'narrow/kernel' (dot) groups of 6",
        "'odd/kernel' (dot) per channel",
        "'both' (dot) per channel",
        "group_axis=1",
    ):
        assert part in text
    assert "wide" not in text
    dynamic = said(Recipe(overrides={"wide|narrow|odd": Dynamic(weights=FOUR, per="row")}), Parts, TOKENS)
    assert "'narrow/kernel' (dot) per channel, groups of 6, 'odd/kernel' (dot) per channel." in dynamic
    formats = said(Recipe(overrides={"wide|narrow|odd": WeightFormat("nf4", group_size=8)}), Parts, TOKENS)
    assert "'narrow/kernel' (dot) per channel, groups of 6, 'odd/kernel' (dot) per channel." in formats


def test_groups_that_no_weight_has_are_an_error() -> None:
    text = refused(Recipe(weights=QSpec(bits=4, axis=-1, group_size=32)))
    assert "no weight of this model can have groups of 32" in text
    assert "'first/kernel' (dot) per channel, 'last/kernel' (dot) groups of 16" not in text
    assert "'first/kernel' (dot) per channel, 'last/kernel' (dot) per channel" in text


def test_everything_that_is_wrong_is_reported_together() -> None:
    text = refused(Recipe(overrides={nnx.Linear: QSpec(axis=0)}))
    assert "'first/kernel': expected scales along" in text
    assert "'last/kernel': expected scales along" in text

    class Convolutions(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = (nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(i)) for i in (0, 1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.a(x))

    text = refused(Recipe(overrides={".*": ROWS}), Convolutions, normal(2, 6, 6, 4))
    assert "in module 'a': Dynamic" in text
    assert "in module 'b': Dynamic" in text


# ---------------------------------------------------------------------------- settings that nothing uses


def test_dynamic_takes_the_codes_of_the_recipe() -> None:
    x, eight = X, QSpec(bits=8, symmetric=False)
    taken = qjax.quantize(MLP(), Recipe(weights=FOUR, activations=eight, overrides={".*": ROWS}), x)
    own = qjax.quantize(MLP(), Recipe(overrides={".*": Dynamic(weights=FOUR, activations=eight, per="row")}), x)
    plain = qjax.quantize(MLP(), Recipe(overrides={".*": ROWS}), x)
    np.testing.assert_array_equal(taken(x), own(x))
    assert not np.array_equal(taken(x), plain(x))
    (first, _, last, _) = (line.split() for line in taken.summary().splitlines()[2:])
    assert first[:6] == ["first/kernel", "weight", "first", "dot", "8x16", "int4"]
    assert "groups of 8" in taken.summary()
    assert last[0] == "last/kernel"
    assert "per row" in taken.summary()
    assert "int8 [-128, 127]" in taken.summary()


def test_the_summary_has_rows_for_formats() -> None:
    lines = (
        qjax.quantize(MLP(), Recipe(overrides={".*": WeightFormat("mxfp4", group_size=8)}), X).summary().splitlines()
    )
    assert [line.split()[:6] for line in lines[2:]] == [
        ["first/kernel", "weight", "first", "dot", "8x16", "mxfp4"],
        ["last/kernel", "weight", "last", "dot", "16x4", "mxfp4"],
    ]
    # a group of all 8 weights is a scale per channel
    assert "per channel  " in lines[2]
    assert "per channel, groups of 8" in lines[3]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weights": QSpec(bits=16)}, "takes those of the recipe.* weights: expected 2 to 8 bits"),
        ({"weights": QSpec(symmetric=False)}, "weights: expected symmetric codes"),
        ({"activations": QSpec(bits=12)}, "activations: expected 2 to 8 bits.* Or give it its own"),
    ],
)
def test_codes_of_the_recipe_that_dynamic_does_not_take(kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"override 'head': .*{message}"):
        Recipe(overrides={"head": Dynamic()}, **kwargs)
    Recipe(overrides={"head": Dynamic(weights=QSpec(bits=8), activations=QSpec(bits=8))}, **kwargs)


EVERYWHERE = {".*": Dynamic(weights=QSpec(bits=8), activations=QSpec(bits=8), per="row")}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weights": FOUR}, "Nothing uses weights=QSpec.bits=4.*because no weight without an override"),
        ({"activations": QSpec(bits=4)}, "Nothing uses activations=.*because no activation without an override"),
        ({"method": "static"}, "Nothing uses method='static', because no activation"),
        ({"weight_method": "static"}, "Nothing uses weight_method='static', because no weight"),
        ({"observer": "percentile"}, "Nothing uses observer='percentile', because no activation is calibrated"),
        ({"weight_observer": "mse"}, "Nothing uses weight_observer='mse', because no weight is calibrated"),
        ({"first_last_bits": 8}, "Nothing uses first_last_bits=8, because no layer"),
        ({"output_bits": 4}, "Nothing uses output_bits=4"),
        ({"other_bits": 8}, "Nothing uses other_bits=8"),
        ({"reduce_range": True}, "Nothing uses reduce_range=True"),
        ({"scan": "shared"}, "Nothing uses scan='shared', because no scan"),
        ({"adapters": "within"}, "Nothing uses adapters='within', because the model has no adapters"),
    ],
)
@pytest.mark.parametrize("overrides", [EVERYWHERE, {".*": FLOAT}], ids=["dynamic", "float"])
@pytest.mark.sampled(12)
def test_a_setting_that_no_tensor_uses(overrides: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UserWarning, match=message):
        qjax.quantize(MLP(), Recipe(overrides=overrides, **kwargs), X)


def test_overrides_without_an_effect() -> None:
    assert "override 'input' sets weights, but it matches only activations: 'input'" in refused(
        Recipe(overrides={"input": QSpec(bits=4)})
    )
    of_kernel = Override(activations=QSpec(bits=4))
    assert "Write qjax.Override(weights=...)" in refused(Recipe(overrides={"last/kernel": of_kernel}))
    inside: Any = {".*": ROWS, "last": QSpec(bits=4)}
    assert "override 'last' is for calibrated integers, but other overrides keep everything" in refused(
        Recipe(overrides=inside)
    )
    order: Any = {"last": QSpec(bits=6), ".*": QSpec(bits=4)}
    assert "The later override '.*' replaces override 'last', so list 'last' after it" in said(Recipe(overrides=order))


# ---------------------------------------------------------------------------- parts that stay float


def test_float_steps_of_a_block_are_named_with_the_override_that_avoids_them() -> None:
    text = said(Recipe(overrides={"block": ROWS}), Stack)
    assert "'block/norm' (" in text
    assert "'block/mlp' (the function " in text
    assert "overrides={'block/mlp/up|block/mlp/down': qjax.Dynamic(...)}" in text
    qjax.quantize(Stack(), Recipe(overrides={"block/mlp/up|block/mlp/down": ROWS}), X)


# ---------------------------------------------------------------------------- what a conversion refuses


class Normalized(nnx.Module):
    def __init__(self) -> None:
        self.fc, self.norm = linear(8, 4), nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.fc(x))


class Squared(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ x.T


TQT: dict[str, Any] = {"target": "fpga", "activations": QSpec(bits=8), "method": "tqt"}


def test_scales_that_a_target_cannot_have() -> None:
    text = refused(Recipe(**TQT))
    assert "'lsq' of weights finds other scales. Use weight_method='tqt'" in text
    assert text.count("\n") == 0
    assert refused(Recipe(target="fpga")).count("\n") == 1


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (Normalized, {**TQT, "weight_method": "tqt"}, "powers of two.*without batch norm"),
        (Normalized, {"weights": QSpec(axis=-1, narrow_range=False)}, "may hold the code -128"),
        (MLP, {"weights": QSpec(bits=16, axis=-1, symmetric=False)}, "asymmetric codes of 16 bits"),
        (MLP, {"weights": QSpec(bits=16, axis=-1), "activations": QSpec(bits=16)}, "beyond int32"),
        (Squared, {"activations": QSpec(bits=16)}, "beyond int32"),
    ],
)
def test_a_conversion_that_will_be_refused(model: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UserWarning, match=f"the model trains, but convert will refuse it.\n.*{message}"):
        qjax.quantize(model(), Recipe(**kwargs), X)


def test_a_loop_in_float_that_converts_to_nothing() -> None:
    class Loop(nnx.Module):
        def __init__(self) -> None:
            self.rnn = nnx.RNN(nnx.SimpleCell(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> Any:
            return self.rnn(x)

    with pytest.raises(UserWarning, match=r"convert will refuse it\.\n.*the outputs that a scan stacks"):
        qjax.quantize(Loop(), Recipe(overrides={".*": WeightFormat("nf4")}), normal(2, 3, 4))
