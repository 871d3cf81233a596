"""What the compiler makes of a residual chain grows with its length, not with the paths through it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import qjax
from benchmarks.growth import BATCH, WIDTH, Chain


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


PROGRAMS: dict[str, Any] = {
    "step": nnx.grad(loss),
    "codes": lambda model, x: model.codes(x),
}


def instructions(blocks: int, program: Any) -> int:
    """How many there are in the compiled program, those inside of fusions included."""
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    qmodel = qjax.quantize(Chain(blocks, nnx.Rngs(0)), qjax.Recipe(), x)
    text = nnx.jit(program).lower(qmodel, x).compile().as_text()
    assert text is not None
    return sum(" = " in line for line in text.splitlines())


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.exhaustive
def test_the_compiled_program_is_linear_in_the_blocks(name: str) -> None:
    one, two, four = (instructions(blocks, PROGRAMS[name]) for blocks in (3, 6, 12))
    # the first block, which reads the input, is the only one that differs
    assert four - two <= 2.1 * (two - one)
