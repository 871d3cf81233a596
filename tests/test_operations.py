"""How many operations the compiled programs have: what a first call costs grows with them. No times are taken."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from benchmarks.first_calls import kernels, operations
from benchmarks.growth import Chain
from tests.layers.round_trip import data

DEPTHS = (1, 2, 4)


@pytest.fixture(scope="module")
def counts():
    """depth -> operations of the exact forward; of a quantized training step."""
    found = {}
    for depth in DEPTHS:
        x = data(4, 8)
        qmodel = qjax.quantize(Chain(depth, nnx.Rngs(0)), qjax.Recipe(), x)
        qmodel.eval()
        graphdef, state = nnx.split(qmodel)
        forward = qjax.exact(qmodel, x)

        def exact(state, x, graphdef=graphdef, forward=forward):
            return forward(nnx.merge(graphdef, state), x)

        def step(state, x, graphdef=graphdef):
            return jax.grad(lambda state: jnp.mean(nnx.merge(graphdef, state)(x)), allow_int=True)(state)

        found[depth] = [operations(jax.jit(program).lower(state, x).as_text()) for program in (exact, step)]
    return found


@pytest.mark.parametrize("program", [0, 1], ids=("exact forward", "quantized step"))
def test_operations_grow_linearly_with_depth(counts, program):
    per_block = [(counts[b][program] - counts[a][program]) / (b - a) for a, b in itertools.pairwise(DEPTHS)]
    assert per_block[1] <= 1.05 * per_block[0]


class Mixed(nnx.Module):
    """Products with weights of two kinds, and of three chains behind them."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.bare = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(nnx.relu(self.bare(x.mean(axis=(1, 2)))))


def test_products_of_all_kinds_share_the_derivation_of_constants():
    """One for each would be 5000 operations and 86 kernels more than the fake-quantized forward has."""
    x = data(4, 4, 4, 2)
    qmodel = qjax.quantize(Mixed(nnx.Rngs(0)), qjax.Recipe(), x)
    qmodel.eval()
    graphdef, state = nnx.split(qmodel)
    forward = qjax.exact(qmodel, x)
    exact, fake = (
        jax.jit(function).lower(state, x)
        for function in (lambda s, x: forward(nnx.merge(graphdef, s), x), lambda s, x: nnx.merge(graphdef, s)(x))
    )
    found = [
        (operations(str(lowered.as_text())), kernels(str(lowered.compile().as_text()))) for lowered in (exact, fake)
    ]
    more = [a - b for a, b in zip(*found, strict=True)]
    assert more[0] < 3300
    assert more[1] < 45


def test_a_further_block_adds_few_operations(counts):
    """A block is two products and a sum. What equal blocks share is one function, which is counted once.

    Constants of one block derived by themselves are some 700 operations. Its quantizers and products are some 800 in a
    training step, when each is lowered by itself.
    """
    blocks = DEPTHS[-1] - DEPTHS[-2]
    exact, step = (np.array(counts[DEPTHS[-1]]) - np.array(counts[DEPTHS[-2]])) / blocks
    assert exact < 400
    assert step < 150
