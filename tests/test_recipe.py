"""What a recipe gives to which tensor, and what it refuses."""

import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import FLOAT, Override, QSpec, Recipe
from tests.layers.round_trip import assert_same, check, data


class Block(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.fc(x))


class Net(nnx.Module):
    """stem -> two residual blocks -> norm -> head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(3, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def specs(**kwargs) -> dict[str, QSpec]:
    # which tensor has which codes does not depend on ranges, and measuring them takes longer than all the rest
    with mock.patch("qjax.api.workflow.measure_ranges"):
        qmodel = qjax.quantize(Net(), Recipe(**kwargs), data(4, 3))
    return {name: q.spec for name, q in qmodel.plan.quantizers}


def bits(**kwargs) -> dict[str, int]:
    return {name: spec.bits for name, spec in specs(**kwargs).items()}


NAMES = {
    *("input", "stem", "stem/kernel", "head", "head/kernel"),
    *("blocks/0/fc", "blocks/0/fc/kernel", "blocks/0/add"),
    *("blocks/1/fc", "blocks/1/fc/kernel", "blocks/1/add"),
}


def test_default_is_w8a8():
    found = specs()
    assert set(found) == NAMES
    for name, spec in found.items():
        if name.endswith("kernel"):
            assert spec == QSpec(bits=8, axis=1)
            assert (spec.qmin, spec.qmax) == (-127, 127)
        else:
            assert spec == QSpec(bits=8, symmetric=False)
            assert (spec.qmin, spec.qmax) == (-128, 127)


@pytest.mark.exhaustive
def test_override_by_path_type_and_quantizer():
    four = QSpec(bits=4, axis=-1)
    by_path = bits(overrides={r"blocks/\d+": four})
    assert {name for name, n in by_path.items() if n == 4} == {"blocks/0/fc/kernel", "blocks/1/fc/kernel"}
    by_type = bits(overrides={Block: Override(activations=QSpec(bits=4, symmetric=False))})
    assert {name for name, n in by_type.items() if n == 4} == {
        f"blocks/{i}/{name}" for i in (0, 1) for name in ("fc", "add")
    }
    by_layer_type = bits(overrides={nnx.Linear: four})
    assert {name for name, n in by_layer_type.items() if n == 4} == {n for n in NAMES if n.endswith("kernel")}
    by_quantizer = bits(overrides={"blocks/1/add": Override(activations=QSpec(bits=6, symmetric=False))})
    assert {name for name, n in by_quantizer.items() if n == 6} == {"blocks/1/add"}
    inputs = bits(overrides={"input": Override(activations=QSpec(bits=16))})
    assert {name for name, n in inputs.items() if n == 16} == {"input"}


def test_later_overrides_win():
    found = bits(overrides={".*": QSpec(bits=4, axis=-1), "head": QSpec(bits=6, axis=-1)})
    assert (found["head/kernel"], found["stem/kernel"]) == (6, 4)


@pytest.mark.exhaustive
def test_method_override():
    qmodel = qjax.quantize(Net(), Recipe(overrides={"stem": Override(method="static")}), data(4, 3))
    methods = {name: q.method for name, q in qmodel.plan.quantizers}
    assert {name for name, m in methods.items() if m == "static"} == {"stem", "stem/kernel"}


@pytest.mark.exhaustive
def test_float_parts_have_no_quantizers_inside():
    no_head = specs(overrides={"head": FLOAT})
    # what the part in reals reads is still a tensor of codes
    assert set(no_head) == NAMES - {"head", "head/kernel"}
    no_block = specs(overrides={"blocks/0": FLOAT})
    # what comes out of the part in reals is quantized for its next reader
    assert len({name for name in no_block if name.startswith("blocks/0")}) == 1
    assert set(specs(overrides={Block: FLOAT})) >= {"input", "stem/kernel", "head/kernel", "head"}


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_model_with_a_float_head_trains_and_ends_in_an_island():
    x = data(4, 3)
    model = Net()
    qmodel = qjax.quantize(model, Recipe(overrides={"head": FLOAT}), x)
    assert qmodel(x).shape == (4, 2)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    assert [node.op for node in graph.ir.nodes][-1] == "island"
    assert graph(x).shape == (4, 2)
    everything = qjax.quantize(model, Recipe(overrides={".*": FLOAT}), x)
    assert not everything.plan.quantizers
    assert_same(everything(x), model(x))


def test_first_and_last_layer():
    low = {"weights": QSpec(bits=2, axis=-1), "activations": QSpec(bits=2, symmetric=False)}
    found = bits(first_last_bits=8, **low)
    eight = {"input", "stem/kernel", "head/kernel", "head", "blocks/1/add"}
    assert found == {name: 8 if name in eight else 2 for name in NAMES}


@pytest.mark.exhaustive
def test_what_leaves_the_model_keeps_its_bits():
    low = {"activations": QSpec(bits=2, symmetric=False)}
    assert bits(**low)["head"] == 8
    assert bits(output_bits=4, **low)["head"] == 4
    assert bits(output_bits=4)["head"] == 8


@pytest.mark.exhaustive
def test_what_no_product_reads_has_bits_of_its_own():
    low = {"activations": QSpec(bits=2, symmetric=False)}
    branches = {"blocks/0/fc", "blocks/1/fc"}
    found = bits(other_bits=6, **low)
    assert found == {**bits(**low), **dict.fromkeys(branches, 6)}
    assert bits(other_bits=6) == bits(), "no fewer bits than the activations have"
    assert bits(other_bits=6, first_last_bits=4, **low) == {
        **bits(first_last_bits=4, **low),
        **dict.fromkeys(branches, 6),
    }
    own = {"blocks/0/fc": Override(activations=QSpec(bits=3, symmetric=False))}
    assert bits(other_bits=6, overrides=own, **low) == {**found, "blocks/0/fc": 3}


class Mixed(nnx.Module):
    """Attention between norms, and an LSTM over what comes out."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(8, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        states: Any = self.rnn(x)
        return self.head(nnx.gelu(states[:, -1]))


OPERANDS = {
    *("norm/normalize", "attention/query", "attention/key", "attention/value", "attention/softmax", "attention/dot#2"),
    *("add", "rnn/cell/multiply#3", "table"),
}
"""What the dense layers and the products of attention read: not the scores, the gates or the cell."""


def mixed():
    x = data(4, 5, 8)
    four = QSpec(bits=4, symmetric=False)
    recipe = Recipe(weights=QSpec(bits=4, axis=-1), activations=four, other_bits=8)
    return qjax.quantize(Mixed(), recipe, x), x


@pytest.mark.exhaustive
def test_the_operands_of_products_in_attention_and_in_a_loop():
    qmodel, _ = mixed()
    found = {name: q.spec.bits for name, q in qmodel.plan.quantizers}
    assert {name for name, n in found.items() if n == 4 and not name.endswith("kernel")} == OPERANDS


@pytest.mark.exhaustive
def test_products_of_few_bits_between_others_of_more_are_exact():
    qmodel, x = mixed()
    qmodel.eval()
    assert_same(qjax.exact(qmodel, x)(qmodel, x), qjax.convert(qmodel, x)(x))


def test_override_that_matches_nothing_lists_what_there_is():
    with pytest.raises(ValueError, match="matches nothing") as error:
        specs(overrides={"block": QSpec(bits=4, axis=-1)})
    text = str(error.value)
    assert "Recipe: override 'block' matches nothing in this model." in text
    assert "Module paths: 'blocks', 'blocks/0'" in text or "'blocks/0', 'blocks/0/fc'" in text
    assert "'blocks/1/add'" in text
    assert "'stem/kernel'" in text
    assert re.search(r"Layer types: .*Block.*Linear", text)
    assert "'.*'" in text
    with pytest.raises(ValueError, match="override Conv matches nothing"):
        specs(overrides={nnx.Conv: FLOAT})
    with pytest.raises(ValueError, match="'norm' matches nothing"):
        specs(overrides={"norm": FLOAT})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"target": "abacus"}, ValueError, "abacus"),
        ({"activations": QSpec(axis=-1)}, ValueError, "per-tensor activations"),
        ({"method": "dynamic"}, ValueError, "is for weights only"),
        ({"method": "guess"}, ValueError, "lsq.*guess"),
        ({"weight_method": "guess"}, ValueError, "lsq.*guess"),
        ({"observer": "guess"}, ValueError, "guess.*minmax"),
        ({"weight_observer": "guess"}, ValueError, "minmax.*guess"),
        ({"scan": "guess"}, ValueError, "stacked.*guess"),
        ({"output_bits": 1}, ValueError, "output_bits"),
        ({"first_last_bits": 40}, ValueError, "first_last_bits"),
        ({"other_bits": "8"}, ValueError, r"other_bits: expected an integer in 2\.\.16, got '8'"),
        ({"other_bits": 1}, ValueError, r"other_bits: expected an integer in 2\.\.16, got 1"),
        ({"overrides": {"head": 4}}, TypeError, r"qjax.FLOAT, qjax.Dynamic\(\) or a qjax.WeightFormat, got 4"),
        ({"overrides": {"(": FLOAT}}, ValueError, "not a regular expression"),
        ({"overrides": {3: FLOAT}}, TypeError, "expected a path or a layer type as a key"),
    ],
)
def test_invalid_recipes(kwargs, error, message):
    with pytest.raises(error, match=message):
        Recipe(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"overrides": {"head": Override(activations=QSpec(axis=-1))}}, "'head'.*per-tensor"),
        ({"weights": QSpec(axis=0)}, "expected scales along the output channels"),
        (
            {"weights": QSpec(symmetric=False, axis=-1), "weight_method": "tqt"},
            "power-of-two thresholds need symmetric",
        ),
        ({"overrides": {"head": Override(method="dynamic")}}, "'head'.*for weights"),
    ],
)
def test_recipes_that_a_tensor_cannot_take(kwargs, message):
    with pytest.raises(ValueError, match=message):
        specs(**kwargs)


class Small(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(5, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


GRIDS: dict[str, dict[str, Any]] = {
    "weights per tensor": {"weights": QSpec(bits=8)},
    "int4": {"weights": QSpec(bits=4, axis=-1), "activations": QSpec(bits=4, symmetric=False)},
    "int2": {"weights": QSpec(bits=2, axis=-1), "activations": QSpec(bits=2, symmetric=False)},
    "uint8 activations": {"activations": QSpec(bits=8, signed=False, symmetric=False)},
    "symmetric activations": {"activations": QSpec(bits=8)},
    "asymmetric weights": {"weights": QSpec(bits=8, axis=-1, symmetric=False)},
    "int16 activations": {"activations": QSpec(bits=16)},
    "uint4 weights": {"weights": QSpec(bits=4, axis=-1, signed=False, symmetric=False)},
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_grids_convert_exactly(name):
    recipe = Recipe(**GRIDS[name])
    qmodel, graph = check(Small(), data(8, 6), recipe)
    spec = dict(qmodel.plan.quantizers)["a/kernel"].spec
    assert qmodel.qparams()["a/kernel"].scale.size == (1 if recipe.weights.axis is None else 5)
    assert spec.bits == recipe.weights.bits
    kernel = np.asarray(graph.ir.constant(graph.ir.nodes[0], "kernel"))
    if spec.symmetric:
        assert np.abs(kernel).max() <= spec.qmax
    hidden = graph.ir.tensors[graph.ir.nodes[0].output].quantization
    assert hidden is not None
    assert hidden.qmax == recipe.activations.qmax


def test_one_range_that_is_no_list_is_refused():
    with pytest.raises(TypeError, match=r"integers: expected a list of qjax.integers\(...\), got Integers"):
        Recipe(integers=qjax.integers("tokens", 0, 9))  # pyright: ignore[reportArgumentType]


def test_reduce_range_takes_one_bit_of_every_activation_of_eight():
    found = specs(reduce_range=True, overrides={"stem": Override(activations=QSpec(bits=4, symmetric=False))})
    for name, spec in found.items():
        expected = 8 if name.endswith("kernel") else 4 if name == "stem" else 7
        assert spec.bits == expected
        assert spec.dtype == np.int8
    assert (found["head"].qmin, found["head"].qmax) == (-64, 63)
    unsigned = specs(reduce_range=True, activations=QSpec(bits=8, signed=False, symmetric=False), first_last_bits=8)
    assert {(s.dtype.name, s.qmin, s.qmax) for n, s in unsigned.items() if not n.endswith("kernel")} == {
        ("uint8", 0, 127)
    }
    with pytest.warns(UserWarning, match="Nothing uses reduce_range=True, because no activation has 8 bits"):
        assert bits(reduce_range=True, activations=QSpec(bits=16))["head"] == 16
    # the range is measured as for 8 bits
    recipe = Recipe(reduce_range=True)
    spec = QSpec(bits=7, symmetric=False)
    assert type(recipe.observer_of(spec)) is type(Recipe().observer_of(QSpec(symmetric=False)))
    assert type(recipe.observer_of(spec)) is not type(Recipe().observer_of(spec))
    with pytest.raises(TypeError, match=r"reduce_range: expected True or False, got 7"):
        Recipe(reduce_range=7)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------- what a recipe cannot mean


class Dense(nnx.Module):
    def __init__(self) -> None:
        self.head = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x)


ROWS = np.asarray(np.random.default_rng(1).normal(size=(8, 6)), np.float32)


@pytest.mark.parametrize("axis", [7, 2, -3, (0, 5)])
def test_an_axis_that_the_weight_lacks(axis: Any) -> None:
    with pytest.raises(
        ValueError, match=r"'head/kernel': expected an axis of a tensor of shape \(6, 4\), from -2 to 1, got axis="
    ):
        qjax.quantize(Dense(), Recipe(weights=QSpec(axis=axis)), ROWS)


@pytest.mark.parametrize("name", ["weights", "activations"])
@pytest.mark.parametrize("kind", [Recipe, Override])
def test_bits_in_the_place_of_a_spec(kind: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected a QSpec, got 4. For 4 bits write QSpec\(bits=4\)"):
        kind(**{name: 4})
    with pytest.raises(TypeError, match=r"expected a QSpec, an Override.*got 4. For 4 bits write QSpec\(bits=4\)"):
        Recipe(overrides={"head": 4})


def test_pact_needs_codes_from_zero_upwards() -> None:
    """It failed after training, in `summary`."""
    with pytest.raises(
        ValueError, match=r'activations: method "pact" clips to \[0, alpha\].*QSpec\(bits=8, symmetric=False'
    ):
        Recipe(method="pact", activations=QSpec(bits=8))
    with pytest.raises(ValueError, match=r"Override: activations: .*pact"):
        Override(method="pact", activations=QSpec(bits=4))
    with pytest.raises(ValueError, match=r"Quantizer 'head': method \"pact\""):
        qjax.quantize(Dense(), Recipe(activations=QSpec(bits=8), overrides={"head": Override(method="pact")}), ROWS)
    assert "pact" in qjax.quantize(Dense(), Recipe(method="pact"), ROWS).summary()


@pytest.mark.parametrize("size", [1e-20, 1e-30])
def test_numbers_too_near_zero_for_a_scale(size: float) -> None:
    """1e-30 became zeros of scale 1."""
    with pytest.raises(ValueError, match=r"Quantizer 'input': .*[Mm]ultiply the data or the parameters by a constant"):
        qjax.quantize(Dense(), Recipe(), ROWS * np.float32(size))
    model = Dense()
    model.head.kernel[...] = model.head.kernel[...] * np.float32(size)
    with pytest.raises(ValueError, match=r"Quantizer 'head': .*[Mm]ultiply the data or the parameters"):
        qjax.quantize(model, Recipe(), ROWS)


def test_zeros_and_a_channel_that_died_keep_scale_one() -> None:
    model = Dense()
    model.head.kernel[...] = model.head.kernel[...].at[:, 1].multiply(np.float32(1e-35))
    scales = np.asarray(qjax.quantize(model, Recipe(), ROWS).qparams()["head/kernel"].scale)
    assert scales[1] == 1.0
    assert (np.delete(scales, 1) < 0.1).all()
    assert float(qjax.quantize(Dense(), Recipe(), ROWS * 0).qparams()["input"].scale) == 1.0


def test_codes_that_the_input_does_not_have() -> None:
    qmodel = qjax.quantize(Dense(), Recipe(activations=QSpec(bits=4)), ROWS)
    qmodel.eval()
    graph = qjax.convert(qmodel, ROWS)
    codes = graph.quantize(ROWS)
    inside = np.asarray(graph.run(codes))
    wrong = np.array(codes)
    for code in (100, -8):
        wrong[3, 2] = code
        with pytest.raises(
            ValueError, match=rf"'input': expected codes in \[-7, 7\], got codes in .*{code}.*graph.quantize"
        ):
            graph.run(wrong)
        with pytest.raises(ValueError, match="expected codes in"):
            graph.run(jnp.asarray(wrong))
    # inside of a trace nothing can be read, and a constant beside it still can
    assert np.array_equal(jax.jit(lambda c: graph.run(c))(codes), inside)
    assert np.array_equal(jax.jit(lambda: graph.run(codes))(), inside)
    with pytest.raises(TypeError, match="expected codes of dtype int8, got int32"):
        graph.run(np.asarray(codes, np.int32))
    with pytest.raises(TypeError, match="expected codes of dtype int8, got list"):
        graph.run([[1] * 6])
    with pytest.raises(ValueError, match=r"expected shape \(batch, 6\), got \(8, 5\)"):
        graph.run(codes[:, :5])
