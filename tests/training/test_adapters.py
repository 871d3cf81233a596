"""Frozen bases and adapters: the same bits from packed codes, steps that move adapters alone, and merging."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, QSpec, Recipe, WeightFormat
from qjax.training import freeze_base, merge_adapters, thaw_base

BASES = ".*/(up|base_module)"
GROUPS = QSpec(bits=4, axis=-1, group_size=8)
RECIPES = {
    "W8A8": {},
    "W4A8": {BASES: QSpec(bits=4, axis=-1)},
    "W3A8, asymmetric": {BASES: QSpec(bits=3, axis=-1, symmetric=False)},
    "W4A8 in groups": {BASES: GROUPS, ".*/lora": QSpec(bits=8, axis=-1)},  # two weights of an adapter are no group
    "nf4": {".*/(up|middle|base_module)": WeightFormat("nf4", group_size=8)},
    "fp8": {BASES: WeightFormat("fp8_e4m3")},
    "8da4w": {BASES: Dynamic(weights=GROUPS, per="row")},
    "ternary": {BASES: Dynamic(weights=WeightFormat("ternary"), per="row")},
}
TOKENS = jax.random.randint(jax.random.key(0), (3, 5), 0, 8)


class Scaled(nnx.Linear):
    """A linear layer with an adapter as other libraries write it: one einsum of three operands, and a factor."""

    def __init__(self, inputs, outputs, rngs):
        super().__init__(inputs, outputs, rngs=rngs)
        self.kernel_lora_a = nnx.LoRAParam(jax.random.normal(rngs.params(), (inputs, 2)))
        self.kernel_lora_b = nnx.LoRAParam(jnp.zeros((2, outputs)))

    def __call__(self, x):
        return super().__call__(x) + jnp.einsum("btd,dr,rn->btn", x, self.kernel_lora_a, self.kernel_lora_b) * 2.0


class Block(nnx.Module):
    """A residual block whose layers have adapters of both kinds of flax, and of another."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.LoRALinear(16, 24, lora_rank=2, rngs=rngs)
        self.middle = Scaled(24, 16, rngs)
        self.down = nnx.LoRA(16, 2, 16, base_module=nnx.Linear(16, 16, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.middle(nnx.relu(self.up(self.norm(x))))))


class Model(nnx.Module):
    """Tokens in, scores out."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens):
        return self.head(self.block(self.embed(tokens)))


class Scanned(Model):
    """Three blocks in one scan."""

    def __init__(self):
        super().__init__()
        self.block = nnx.vmap(Block, in_axes=0, out_axes=0)(nnx.Rngs(1).split(3))

    def __call__(self, tokens):
        blocks = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(blocks(self.embed(tokens), self.block))


def filled(qmodel):
    """Adapters with numbers in them."""
    for index, (_, adapter) in enumerate(nnx.to_flat_state(nnx.state(qmodel, nnx.LoRAParam))):
        adapter[...] = 0.2 * jax.random.normal(jax.random.key(index), adapter.shape)


def run(qmodel):
    return np.asarray(nnx.jit(lambda model: model(TOKENS))(qmodel))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:.* from a single number")  # adapters begin at zero
@pytest.mark.exhaustive
def test_codes_compute_what_the_floats_computed(name):
    qmodel = qjax.quantize(Model(), Recipe(overrides=RECIPES[name]), TOKENS)
    filled(qmodel)
    before = run(qmodel)
    result = freeze_base(qmodel, TOKENS)
    assert {"block/up/kernel", "block/down/base_module/kernel"} <= set(result.names)
    assert result.after < result.before
    assert not result.left
    np.testing.assert_array_equal(run(qmodel), before)
    thaw_base(qmodel)
    if name not in ("ternary", "8da4w", "fp8"):  # scales of the others are found anew
        np.testing.assert_array_equal(run(qmodel), before)


@pytest.mark.filterwarnings("ignore:.* from a single number")  # adapters begin at zero
@pytest.mark.exhaustive
def test_a_scan_holds_codes_and_its_graph_is_the_same():
    qmodel = qjax.quantize(Scanned(), Recipe(overrides=RECIPES["nf4"]), TOKENS)
    filled(qmodel)
    before, graph = run(qmodel), qjax.convert(qmodel, TOKENS)
    freeze_base(qmodel, TOKENS)
    codes, scales = nnx.to_pure_dict(nnx.state(qmodel.model))["block"]["up"]["kernel"]
    assert (codes.shape, codes.dtype, scales.shape) == ((3, 16 * 24 // 2), jnp.uint8, (3, 24, 2))
    np.testing.assert_array_equal(run(qmodel), before)
    np.testing.assert_array_equal(qjax.convert(qmodel, TOKENS)(TOKENS), graph(TOKENS))


def test_a_step_moves_adapters_alone():
    qmodel = qjax.quantize(Model(), Recipe(adapters="within", overrides=RECIPES["W4A8"]), TOKENS)
    freeze_base(qmodel, TOKENS)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(0.5), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(qmodel, optimizer):
        def loss(qmodel):
            return optax.softmax_cross_entropy_with_integer_labels(qmodel(TOKENS), TOKENS).mean()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(qmodel)
        optimizer.update(qmodel, grads)
        return value

    rest = jax.tree.leaves(nnx.state(qmodel, nnx.Not(nnx.LoRAParam)))
    losses = [float(step(qmodel, optimizer)) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    for old, new in zip(rest, jax.tree.leaves(nnx.state(qmodel, nnx.Not(nnx.LoRAParam))), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("model", "name"), [(Model, "W4A8"), (Scanned, "nf4"), (Scanned, "W8A8"), (Model, "8da4w"), (Model, "ternary")]
)
@pytest.mark.sampled(1)
def test_adapters_within_merge_without_a_change_of_bits(model, name):
    """The fused product of two adapters, in a loop over their rank, may round otherwise; small whole numbers do not."""
    qmodel = qjax.quantize(model(), Recipe(adapters="within", overrides=RECIPES[name]), TOKENS)
    assert not any("lora" in quantizer for quantizer in qmodel.plan.by_name)
    freeze_base(qmodel, TOKENS)
    for index, (_, adapter) in enumerate(nnx.to_flat_state(nnx.state(qmodel, nnx.LoRAParam))):
        adapter[...] = jax.random.randint(jax.random.key(index), adapter.shape, -3, 4) / 8
    before, whole = run(qmodel), qjax.convert(qmodel, TOKENS)
    merged = merge_adapters(qmodel, TOKENS)
    np.testing.assert_array_equal(run(merged), before)
    graph = qjax.convert(merged, TOKENS)
    np.testing.assert_array_equal(graph(TOKENS), whole(TOKENS))
    np.testing.assert_array_equal(nnx.jit(qjax.exact(merged, TOKENS))(merged, TOKENS), graph(TOKENS))
    assert len(graph.ir.nodes) == len(whole.ir.nodes)
    np.testing.assert_array_equal(run(qmodel), before)  # the model itself keeps its adapters


@pytest.mark.parametrize("name", ["nf4", "W8A8"])
@pytest.mark.exhaustive
def test_adapters_beside_merge_to_the_same_function_of_floats(name):
    qmodel = qjax.quantize(Model(), Recipe(overrides=RECIPES[name]), TOKENS)
    filled(qmodel)
    qjax.calibrate(qmodel, [TOKENS])
    before = qmodel.trace(TOKENS).evaluate(quantize=None).output
    freeze_base(qmodel, TOKENS)
    whole, merged = qjax.convert(qmodel, TOKENS), merge_adapters(qmodel, TOKENS)
    if name == "W8A8":  # of floats, so the codes of the base show: half a step of 127
        np.testing.assert_allclose(merged.trace(TOKENS).evaluate(quantize=None).output, before, atol=0.05)
    graph = qjax.convert(merged, TOKENS)
    assert len(graph.ir.nodes) < len(whole.ir.nodes)
    np.testing.assert_array_equal(nnx.jit(qjax.exact(merged, TOKENS))(merged, TOKENS), graph(TOKENS))
    assert not any(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(nnx.state(merged, nnx.LoRAParam)))


class Deep(Model):
    """Six blocks, one after the other."""

    def __init__(self):
        super().__init__()
        self.block = nnx.Sequential(*[Block(nnx.Rngs(index)) for index in range(6)])


@pytest.mark.exhaustive
def test_what_waits_for_the_backward_is_packed():
    """A step with a frozen base holds few more bytes than one with a float base, whose weights are arguments."""
    tokens = jnp.zeros((2, 5), jnp.int32)
    qmodel = qjax.quantize(Deep(), Recipe(overrides={".*": qjax.FLOAT, **RECIPES["nf4"]}), tokens)
    freeze_base(qmodel, tokens)

    def temporary(model):
        graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
        loss = lambda adapters, rest: jnp.mean(nnx.merge(graphdef, adapters, rest)(tokens) ** 2)  # noqa: E731
        analysis = jax.jit(jax.grad(loss)).lower(adapters, rest).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    one_block = (24 * 16 + 24 * 16 + 16 * 16) * 4
    assert temporary(qmodel) <= temporary(Deep()) + one_block


class Dropped(Model):
    """An adapter behind a function."""

    def __init__(self):
        super().__init__()
        self.block = nnx.LoRA(16, 2, 16, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.block(nnx.relu(x)))


class Tied(Model):
    """A weight that is read with its adapter and without."""

    def __call__(self, tokens):
        x = self.embed(tokens)
        base = self.block.up
        return self.head(self.block(x)) + jnp.sum(x @ base.kernel[...], axis=-1, keepdims=True)


def test_errors_say_what_is_expected():
    qmodel = qjax.quantize(Dropped(), Recipe(), TOKENS)
    with pytest.raises(ValueError, match=r"cannot merge block/lora_a, block/lora_b.*without a dropout or a function"):
        merge_adapters(qmodel, TOKENS)
    with pytest.raises(ValueError, match=r"no weight can be frozen. the call reads no quantized weight"):
        freeze_base(qmodel, TOKENS, train=nnx.Param)
    freeze_base(qmodel, TOKENS)
    with pytest.raises(
        ValueError, match=r"'head/kernel', which freeze_base stored as codes. Call qjax.training.thaw_base"
    ):
        qjax.training.codes_of(qmodel, ["head/kernel"])
    with pytest.raises(TypeError, match="freeze_base: expected a quantized model, got the float model Dropped"):
        freeze_base(Dropped(), TOKENS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Recipe: adapters: expected one of 'beside', 'within', got 'inside'"):
        Recipe(adapters="inside")  # pyright: ignore[reportArgumentType]


@pytest.mark.exhaustive
def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs/adapters.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(block, names)
    (shown,) = re.findall(r"freeze_base\(.*\)\)  # (.*)", page)
    assert capsys.readouterr().out.strip() == shown
    assert names["losses"][-1] < names["losses"][0]
    codes = np.asarray(names["merged"](names["tokens"])), np.asarray(names["graph"](names["tokens"]))
    assert codes[0].shape == codes[1].shape


def test_a_weight_that_is_read_elsewhere_keeps_its_numbers():
    qmodel = qjax.quantize(Tied(), Recipe(), TOKENS)
    with pytest.raises(ValueError, match="'block/up/kernel' is also read without its adapter"):
        merge_adapters(qmodel, TOKENS)
