"""What `qjax.Dynamic` refuses, with the culprit and the cure."""

import re
from typing import Any

import jax
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, QSpec, Recipe
from qjax.ops.dynamic import DynamicProduct
from qjax.tracing import from_jaxpr
from tests.layers.dynamic_models import ASYMMETRIC, F32, MLP, Conv, Stack, X, normal


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"activations": QSpec(axis=-1)}, ValueError, 'activations: expected a spec without axis.*per="row"'),
        ({"activations": QSpec(bits=16)}, ValueError, "activations: expected 2 to 8 bits, which int8 holds, got 16"),
        ({"weights": QSpec(bits=9)}, ValueError, "weights: expected 2 to 8 bits"),
        ({"weights": ASYMMETRIC}, ValueError, "weights: expected symmetric codes"),
        ({"weights": QSpec(axis=0)}, ValueError, "weights: expected axis=-1"),
        ({"weights": QSpec(group_size=4, group_axis=1)}, ValueError, "no group_axis"),
        ({"activations": QSpec(signed=False)}, ValueError, "symmetric codes must be signed"),
        ({"activations": 8}, TypeError, "activations: expected a QSpec, got 8"),
        ({"per": "channel"}, ValueError, "per: expected one of 'tensor', 'example', 'row', 'block', got 'channel'"),
    ],
)
def test_invalid_settings(kwargs: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Dynamic(**kwargs)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (Conv, {"conv": Dynamic(per="row")}, r"in module 'conv': Dynamic\(per=\"row\"\) on a convolution"),
        (
            MLP,
            {"last": Dynamic(weights=QSpec(bits=4, axis=-1, group_size=5))},
            "can have groups of 5.* 'last/kernel' .dot. per channel",
        ),
        (
            Conv,
            {"conv": Dynamic(weights=QSpec(axis=-1, group_size=2))},
            "can have groups of 2.* 'conv/kernel' .conv. per channel",
        ),
        (MLP, {"middle": Dynamic()}, "override 'middle' matches nothing"),
        (Stack, {"block/norm": Dynamic()}, "override 'block/norm'.* 'block/norm' has none of its own"),
        (MLP, {nnx.Conv: Dynamic()}, "override Conv matches nothing"),
        (MLP, {"last": qjax.Override(method="dynamic")}, r"use qjax.Dynamic\(\), which finds"),
    ],
)
def test_recipes_that_fit_no_model(model: Any, overrides: Any, message: str) -> None:
    x = normal(2, 6, 6, 4) if model is Conv else X
    with pytest.raises(ValueError, match=message):
        qjax.quantize(model(), Recipe(overrides=overrides), x)


def test_the_method_names_the_cure() -> None:
    with pytest.raises(ValueError, match=re.escape('overrides={".*": qjax.Dynamic()}')):
        Recipe(method="dynamic")


def test_a_sum_that_int32_may_not_hold() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((1, 70_000), (70_000, 2))]
    (eqn,) = from_jaxpr(jax.make_jaxpr(lambda x, w: x @ w)(*shapes)).equations
    DynamicProduct(eqn, 1, Dynamic())
    with pytest.raises(ValueError, match="a sum of 70000 products: with these bits only 66311"):
        DynamicProduct(eqn, 1, Dynamic(activations=ASYMMETRIC))
