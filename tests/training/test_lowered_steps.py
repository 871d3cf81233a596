"""What training steps are on a GPU and on a TPU, read in the StableHLO that JAX lowers for both from here.

An abstract mesh of eight devices is enough to lower a step, so these tests need neither devices nor a second process.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, get_abstract_mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import qjax

WIDTH, HIDDEN, BATCH, LENGTH, TOKENS = 16, 24, 8, 6, 32
MESH = AbstractMesh((4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Explicit))


def split(*axes: str | None) -> P | None:
    """An argument `out_sharding`, which only explicit axes take."""
    return P(*axes) if get_abstract_mesh().axis_types else None


class Perceptron(nnx.Module):
    """Two layers whose weights are split along the features between them."""

    rules: ClassVar[dict[str, P]] = {"up": P(None, "model"), "down": P("model", None)}

    def __init__(self) -> None:
        key = nnx.Rngs(0).params
        self.up = nnx.Param(jax.random.normal(key(), (WIDTH, HIDDEN)))
        self.down = nnx.Param(jax.random.normal(key(), (HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.einsum("bi,ij->bj", x, self.up[...], out_sharding=split("data", "model"))
        return jnp.einsum("bj,ji->bi", nnx.relu(h), self.down[...], out_sharding=split("data", None))


class Residual(nnx.Module):
    """Convolutions, batch norms, a residual."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norms[0](self.first(x)))
        return self.head(jnp.mean(nnx.relu(x + self.norms[1](self.second(x))), axis=(1, 2)))


class Block(nnx.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.first(x))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class Recurrent(nnx.Module):
    """An LSTM and a GRU, whose first states are split as the batch is."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.lstm = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.gru = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> Any:
        zero = jnp.zeros((x.shape[0], WIDTH), out_sharding=split("data", None))
        h: Any = self.lstm(x, initial_carry=(zero, zero))
        return self.gru(h, initial_carry=zero)


class Tokens(nnx.Module):
    """A table of embeddings that is split by its rows, and two layers."""

    rules: ClassVar[dict[str, P]] = {"embed/embedding": P("model", None)}

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.up, self.head = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, TOKENS, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed.embedding[...].at[ids].get(out_sharding=split("data", None, None))
        return self.head(nnx.silu(self.up(x)))


def lowered(model: Any, x: np.ndarray) -> str:
    """The StableHLO of a step of Adam for CUDA and TPU; batches are split along "data", parameters by `rules`."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))

    def step(state: Any, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(definition, state)
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss, nnx.state((model, optimizer))

    def placed(path: tuple[Any, ...], array: Any) -> jax.ShapeDtypeStruct:
        name = "/".join(str(getattr(key, "key", "")) for key in path)
        own = (spec for rule, spec in rules.items() if f"/{rule}/" in f"/{name}/" and array.ndim == 2)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(MESH, next(own, P())))

    rules: dict[str, P] = getattr(getattr(model, "model", model), "rules", {})
    with use_abstract_mesh(MESH), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        batch = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, P("data")))
        places = jax.tree_util.tree_map_with_path(placed, state)
        return jax.export.export(jax.jit(step), platforms=["cuda", "tpu"])(places, batch).mlir_module()


def gathered(text: str, shape: tuple[int, ...]) -> list[str]:
    """The lines that make all of a split weight, or of its codes, known to every device."""
    kind = "x".join(map(str, shape))
    constraints = re.findall(rf"sdy\.sharding_constraint .* : tensor<{kind}x\w+>", text)
    return [line for line in constraints if '"model"' not in line]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


IDS = np.random.default_rng(0).integers(0, TOKENS, (BATCH, LENGTH)).astype(np.int32)
DYNAMIC = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), overrides={"up|head": qjax.Dynamic()})
MODELS: dict[str, tuple[Callable[[], nnx.Module], np.ndarray, qjax.Recipe, list[tuple[int, ...]]]] = {
    "perceptron": (Perceptron, draw(BATCH, WIDTH), qjax.Recipe(), [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]),
    "residual": (Residual, draw(BATCH, 8, 8, 3), qjax.Recipe(), []),
    "block": (Block, draw(BATCH, LENGTH, WIDTH), qjax.Recipe(), []),
    "recurrent": (Recurrent, draw(BATCH, LENGTH, WIDTH), qjax.Recipe(), []),
    "tokens": (Tokens, IDS, DYNAMIC, [(TOKENS, WIDTH)]),
}
SLOW = {"block", "recurrent"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW else name for name in MODELS]
)
def test_a_step_lowers_for_cuda_and_tpu(name: str) -> None:
    """No float64, no call of Python, no collective that the float step has not, no gather of a split weight."""
    create, x, recipe, weights = MODELS[name]
    texts = [lowered(create(), x), lowered(qjax.quantize(create(), recipe, x), x)]
    collectives = [
        Counter(re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)|sdy\.(\w+_gather|reshard)", text))
        for text in texts
    ]
    assert collectives[0] == collectives[1]
    for text in texts:
        assert len(re.findall(r"sdy\.sharding_constraint", text)) > 10
        assert "f64" not in text
        assert "custom_call" not in text
        assert "callback" not in text
        # neither cuDNN nor the TPU's compiler has convolutions of integers
        assert not re.findall(r"stablehlo\.convolution.*tensor<[\dx]*x[su]?i\d+>", text)
        for shape in weights:
            assert re.search(rf'tensor<{"x".join(map(str, shape))}xf32> {{[^}}]*sdy.sharding = .*?"model"', text)
            assert gathered(text, shape) == []
