"""How conversion and compilation grow with the number of nodes: residual chains of one and the same block.

A column that grows faster than the nodes says that something is computed anew for each of them, or copied by the
compiler along the residual stream. Seconds of the processor, all threads together: they survive a busy machine better.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import qjax
from benchmarks.report import Grid

WIDTH, BATCH = 8, 4
SIZES = (250, 500, 1000)
STEPS = ("quantize", "step", "convert", "run", "codes")


class Block(nnx.Module):
    """x + linear(relu(linear(x))): three nodes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + 0.1 * self.second(nnx.relu(self.first(x)))


class Chain(nnx.Module):
    """Blocks one after the other."""

    def __init__(self, count: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class Growth:
    """nodes: of the graph. seconds: of each of `STEPS`; "step" (a gradient), "run", "codes": traced, compiled, run."""

    nodes: int
    seconds: tuple[float, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"nodes": self.nodes, **dict(zip(STEPS, self.seconds, strict=True))}


def growth(sizes: Sequence[int] = SIZES) -> Iterator[Growth]:
    """One chain after the other; sizes: about how many nodes."""
    for size in sizes:
        model, x = Chain(max(1, size // 3), nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
        qmodel, first = clocked(lambda model=model, x=x: qjax.quantize(model, qjax.Recipe(), x))
        step = nnx.jit(nnx.grad(lambda qmodel, x: jnp.mean(qmodel(x) ** 2)))
        _, trained = clocked(lambda step=step, qmodel=qmodel, x=x: jax.block_until_ready(nnx.state(step(qmodel, x))))
        qmodel.eval()
        graph, second = clocked(lambda qmodel=qmodel, x=x: qjax.convert(qmodel, x))
        _, third = clocked(lambda graph=graph, x=x: jax.block_until_ready(graph(x)))
        codes = nnx.jit(lambda qmodel, x: qmodel.codes(x))
        _, fourth = clocked(lambda codes=codes, qmodel=qmodel, x=x: jax.block_until_ready(codes(qmodel, x)))
        yield Growth(len(graph.ir.nodes), (first, trained, second, third, fourth))


def clocked(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the processor's seconds."""
    start = time.process_time()
    return function(), time.process_time() - start


def table(results: Sequence[Growth]) -> Grid:
    """Seconds, and milliseconds a node."""
    rows = [
        (str(result.nodes), *(f"{s:.1f} ({1000 * s / result.nodes:.0f})" for s in result.seconds)) for result in results
    ]
    return Grid(("nodes", *STEPS), rows)
