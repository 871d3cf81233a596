"""One compiled function with switches is what a program with only those quantizers computes, bit for bit."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.analysis.layers import layers_of
from qjax.analysis.switched import SwitchedModel
from qjax.model.quantized_model import evaluation_copy
from tests.analysis.models import Deep, Mixed, coarse, halves, in_halves

MODELS = {
    "mixed": (Mixed, halves(3, 4, 4, 2), "stacked"),
    "scan": (Deep, halves(5, 3), "shared"),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    make, x, scan = MODELS[request.param]
    model = in_halves(make())
    return model, qjax.quantize(model, coarse(scan=scan, method="tqt", weight_method="tqt"), x), x


def naive(qmodel, names, x):
    """A program of its own, whose only quantizers are those named."""
    view = evaluation_copy(qmodel)

    @jax.jit
    def run(x):
        return view.trace(x).evaluate(only=names).output

    return run(x)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.sampled(1)
def test_every_switch_on_is_the_quantized_model_and_off_the_float_one(case):
    model, qmodel, x = case
    switched = SwitchedModel(qmodel)
    assert same(switched(switched.names, (x,)), evaluation_copy(qmodel)(x))
    assert same(switched((), (x,)), model(x))


@pytest.mark.sampled(1)
def test_any_set_of_quantizers_is_the_program_with_only_those(case):
    _, qmodel, x = case
    switched = SwitchedModel(qmodel)
    layer = layers_of(qmodel, (x,))[1]
    rng = np.random.default_rng(1)
    sets = [layer.quantizers, *({n for n in switched.names if rng.random() < 0.5} for _ in range(3))]
    off, outputs = switched((), (x,)), []
    for names in sets:
        outputs.append(switched(names, (x,)))
        assert same(outputs[-1], naive(qmodel, names, x))
    assert not any(same(off, output) for output in outputs)
    assert cast("Any", switched._run)._cache_size() == 1  # one compilation served them all


def test_the_models_own_precision_stays():
    x = halves(2, 4)
    model = nnx.Sequential(nnx.Linear(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), nnx.relu)
    switched = SwitchedModel(qjax.quantize(model, coarse(), x))
    names = list(switched.names)
    for chosen in ((), names[::2], names):
        assert switched(chosen, (x,)).dtype == jnp.bfloat16


EXPECTED = {
    # name -> numbers in the weight, multiplications per example
    "mixed": {
        "left": (9 * 2 * 4, 16 * 4 * 9 * 2),
        "right": (1 * 4, 16 * 4),  # two groups: one input channel per output
        "gate": (16, 16 * 16),
        "head": (27, 27),
    },
    "scan": {"stem": (12, 12), "layers": (3 * 16, 3 * 16), "head": (8, 8)},
}


def test_layers_and_their_multiplications(case, request):
    _, qmodel, x = case
    layers = layers_of(qmodel, (x,))
    expected = EXPECTED[request.node.callspec.params["case"]]
    assert {layer.name: (layer.parameters, layer.macs) for layer in layers} == expected
    assert list(expected) == [layer.name for layer in layers]
    inputs = [layer.inputs for layer in layers]
    assert layers[0].inputs == ("input",)
    assert (inputs[0] == inputs[1]) == ("left" in expected)  # two readers of the image
    assert all(layer.weight == f"{layer.name}/kernel" for layer in layers)
    assert all(layer.weight in layer.quantizers for layer in layers)


def test_an_unknown_quantizer_is_an_error(case):
    _, qmodel, x = case
    with pytest.raises(ValueError, match=r"Unknown quantizers: nothing\. Known: input, "):
        SwitchedModel(qmodel)(["nothing"], (x,))
