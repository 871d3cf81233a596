"""What agreement costs: tokens per second of a sampler, seconds of a training step, and of deriving the constants.

Kinds take turns, so that what else runs on the machine reaches all of them alike. Trust the ratios more than seconds.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from experiments.rollout import layouts, proof
from experiments.rollout.decoder import Decoder, sample_call

KINDS = ("exact", "fake-quantized", "float32")


@dataclasses.dataclass
class Costs:
    """Medians in seconds. step: one token of every slot. update: value and gradient of a batch of whole texts.

    refresh: deriving the sampler's constants; 0 where there are none.
    """

    kind: str
    step: float
    update: float
    refresh: float


def measured(size: proof.Size, turns: int = 20) -> list[Costs]:
    """The costs of each kind, for one decoder."""
    model = Decoder(size.width, size.layers, size.length)
    qmodel = proof.calibrated(model, size)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (size.slots, size.length)).astype(np.int32)
    texts = layouts.Texts(tokens, np.full(size.slots, size.length, np.int32))
    layout = layouts.laid_out(texts.part(0, size.batch), size.length)
    following = np.roll(layout.tokens, -1, axis=1)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for kind in KINDS:
        side = proof.side_of(kind, model, qmodel, size, longer=False)
        calls[kind, "step"] = functools.partial(proof.slots, side, texts, size, size.slots, draw=True)
        whole = functools.partial(
            layouts.whole, score=side.score, empty=side.empty,
            tokens=layout.tokens, positions=layout.positions, seen=layout.seen, following=following,
        )  # fmt: skip

        def update(state: Any, whole: Any = whole, read: Any = side.whole[size.length]) -> Any:
            loss = lambda state: jnp.sum(whole(functools.partial(read, state)))  # noqa: E731
            return jax.value_and_grad(loss, allow_int=True)(state)

        calls[kind, "update"] = functools.partial(jax.jit(update), side.state)
        if kind == "exact":
            step = qjax.exact(qmodel, sample_call(model, 1, size.length), state=("cache", 1))
            calls[kind, "refresh"] = functools.partial(nnx.jit(step.constants), qmodel)
    seconds: dict[tuple[str, str], list[float]] = {what: [] for what in calls}
    for turn in range(turns + 1):
        for what, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[what].append(time.perf_counter() - start)
    median = {what: float(np.median(times)) for what, times in seconds.items()}
    return [
        Costs(kind, median[kind, "step"] / (size.length - 1), median[kind, "update"], median.get((kind, "refresh"), 0))
        for kind in KINDS
    ]


def table(found: list[Costs], size: proof.Size) -> str:
    """The costs as a Markdown table."""
    base = {costs.kind: costs for costs in found}["float32"]
    lines = [
        "| model | tokens per second | times float32's | ms per training step | times float32's | ms per refresh |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {costs.kind} | {size.slots / costs.step:,.0f} | {base.step / costs.step:.2f} | {1000 * costs.update:.0f} | "
        f"{costs.update / base.update:.2f} | {f'{1000 * costs.refresh:.1f}' if costs.refresh else ''} |"
        for costs in found
    ]
    return "\n".join(lines)
