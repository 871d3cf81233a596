"""Log-probabilities of sampled tokens, in the forms of a sampler and of a trainer: how many differ, and by how much.

The tokens are drawn once, by `qjax.exact` in 64 slots that are refilled. Every form then computes their
log-probabilities again, and is compared with the trainer that reads whole texts in batches of 32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import qjax
from experiments import language
from experiments.rollout import layouts
from experiments.rollout.decoder import Decoder, in_bfloat16, recipe, sample_call
from experiments.rollout.layouts import Layout, Read, Score, Texts

KINDS = ("exact", "fake-quantized", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and of the texts. slots, batch: of the sampler and of the trainer; steps: of the float training."""

    width: int = 64
    layers: int = 2
    length: int = 64
    texts: int = 2400
    slots: int = 64
    batch: int = 32
    steps: int = 300
    prompt: int = 4
    alone: int = 8
    """One of so many texts is also read in a single slot."""


SMALL = Size(width=32, layers=1, length=8, texts=12, slots=3, batch=4, steps=0, prompt=2, alone=3)


@dataclasses.dataclass
class Row:
    """One form of one kind of model. differ: log-probabilities whose bits are not the trainer's; most: by how much."""

    kind: str
    form: str
    tokens: int
    differ: int
    most: float


@dataclasses.dataclass(frozen=True)
class Side:
    """One kind of model. read: of the parameters `state` and a call, for a sampler's and a trainer's shapes."""

    score: Score
    state: Any
    held: Any
    step: dict[int, Read]
    whole: dict[int, Read]
    empty: Callable[[int, int], Any]
    cache: Callable[[int, int], Any]


def trained(size: Size) -> Decoder:
    """A float decoder of the help texts of Python."""
    model = Decoder(size.width, size.layers, size.length)
    if not size.steps:
        return model
    source = language.text()
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, pieces: Any) -> jax.Array:
        n, t = pieces.shape[0], size.length

        def loss(m: Any) -> jax.Array:
            own = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (n, t))
            seen = jnp.broadcast_to(np.tri(t, dtype=bool), (n, t, t))
            scores, _ = m(pieces[:, :-1], own, own, seen, model.empty(n, t))
            return optax.softmax_cross_entropy_with_integer_labels(scores, pieces[:, 1:]).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    rng = np.random.default_rng(0)
    for _ in range(size.steps):
        starts = rng.integers(0, len(source) - size.length - 1, 32)
        step(model, optimizer, np.stack([source[i : i + size.length + 1] for i in starts]))
    return model


def calibrated(model: Decoder, size: Size) -> qjax.QuantizedModel:
    """The decoder in eight bits, calibrated on texts of its training data."""
    qmodel = qjax.quantize(model, recipe(size.length), sample_call(model, size.length, size.length))
    source, rng = language.text(), np.random.default_rng(1)

    def batch() -> tuple[Any, ...]:
        starts = rng.integers(0, len(source) - size.length, 16)
        tokens = np.stack([source[i : i + size.length] for i in starts])
        return tokens, *sample_call(model, size.length, size.length, 16)[1:]

    qjax.calibrate(qmodel, [batch() for _ in range(4)], progress=False)
    qmodel.eval()
    return qmodel


def side_of(kind: str, model: Decoder, qmodel: qjax.QuantizedModel, size: Size, longer: bool = True) -> Side:
    """One kind of model, for caches as long as the texts and, if `longer`, for those twice as long."""
    lengths = (size.length, 2 * size.length) if longer else (size.length,)
    if kind in ("float32", "bfloat16"):
        definition, state = nnx.split(model if kind == "float32" else in_bfloat16(model))

        def read(state: Any, *call: Any) -> Any:
            return nnx.merge(definition, state)(*call)

        empty = nnx.merge(definition, state).empty
        reads = dict.fromkeys(lengths, read)
        return Side(layouts.float_score, state, dict.fromkeys(lengths, state), reads, reads, empty, empty)
    definition, state = nnx.split(qmodel)
    if kind == "fake-quantized":

        def fake(state: Any, *call: Any) -> Any:
            return nnx.merge(definition, state)(*call)

        reads = dict.fromkeys(lengths, fake)
        held = dict.fromkeys(lengths, state)
        return Side(layouts.float_score, state, held, reads, reads, model.empty, model.empty)
    steps = {s: qjax.exact(qmodel, sample_call(model, 1, s), state=("cache", 1)) for s in lengths}
    wholes = {s: qjax.exact(qmodel, sample_call(model, s, s), state=("cache", 1)) for s in lengths}
    constants = {s: nnx.jit(forward.constants)(qmodel) for s, forward in steps.items()}

    def whole(forward: Any, state: Any, *call: Any) -> Any:
        return forward(nnx.merge(definition, state), *call)

    return Side(
        qjax.log_probs,
        state,
        constants,
        dict(steps),
        {s: functools.partial(whole, forward) for s, forward in wholes.items()},
        model.empty,
        lambda n, places: constants[places].state(model.empty(n, places)),
    )


def drawn(side: Side, size: Size, seed: int = 0) -> tuple[Texts, np.ndarray]:
    """Texts that a side writes after prompts, each up to a length of its own, with their log-probabilities."""
    source, rng = language.text(), np.random.default_rng(seed)
    starts = rng.integers(0, len(source) - size.length, size.texts)
    tokens = np.stack([source[i : i + size.length] for i in starts])
    lengths = rng.integers(size.length // 2, size.length + 1, size.texts).astype(np.int32)
    found, logs = slots(side, Texts(tokens, lengths), size, size.slots, draw=True)
    return Texts(found, lengths), logs


def slots(
    side: Side, texts: Texts, size: Size, count: int, places: int = 0, delay: int = 0, draw: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and log-probabilities of a sampler with that many slots."""
    places = places or size.length
    plan = layouts.schedule(texts, count, delay)
    prompts = np.full(len(texts.tokens), size.prompt, np.int32)
    found = layouts.sampled(
        side.held[places],
        side.cache(count, places),
        texts.tokens,
        prompts,
        plan.text,
        plan.index,
        jax.random.key(7),
        read=side.step[places],
        score=side.score,
        places=places,
        draw=draw,
    )
    return np.asarray(found[0]), np.asarray(found[1])


def trainer_forms(side: Side, texts: Texts, size: Size, longer: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """Name and log-probabilities of each form of the trainer, the first of which is the reference."""
    t, alone = size.length, layouts.laid_out(texts, size.length)
    wholes = {s: functools.partial(_whole, read, side.score, side.empty) for s, read in side.whole.items()}
    compiled = {s: jax.jit(compute) for s, compute in wholes.items()}

    def found(layout: Layout, width: int, batch: int) -> np.ndarray:
        return layouts.scored(functools.partial(compiled[width], side.state), texts, layout, batch)

    yield f"whole texts, batches of {size.batch}", found(alone, t, size.batch)
    yield f"micro-batches of {size.batch // 4}", found(alone, t, size.batch // 4)

    def with_gradient(state: Any, *given: Any) -> jax.Array:
        def loss(state: Any) -> tuple[jax.Array, jax.Array]:
            logs = jax.checkpoint(wholes[t])(state, *given)
            return jnp.sum(logs), logs

        (_, logs), gradients = jax.value_and_grad(loss, has_aux=True, allow_int=True)(state)
        # the gradients are a result, so that nothing of the training step is left out
        leaves = [g for g in jax.tree.leaves(gradients) if jnp.issubdtype(g.dtype, jnp.floating)]
        total = sum(jnp.sum(jnp.abs(g.astype(jnp.float32))) for g in leaves)
        return jax.lax.optimization_barrier((logs, total))[0]

    training = functools.partial(jax.jit(with_gradient), side.state)
    yield "in a training step, remat", layouts.scored(training, texts, alone, size.batch)
    for devices, parts in ((2, 1), (8, 1), (8, 4)):
        if jax.device_count() < devices:
            continue
        mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, parts), ("data", "model"))
        state = jax.tree.map(functools.partial(_split, mesh), side.state)
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("data")))
        whole = functools.partial(compiled[t], state)
        name = f"{devices} devices" + (f", kernels split over {parts}" if parts > 1 else "")
        even = -(-len(alone.tokens) // size.batch) * size.batch
        filled = Layout(
            *(
                np.concatenate([x, np.full((even - len(x), t), fill, np.int32)])
                for x, fill in ((alone.tokens, 0), (alone.owner, -1), (alone.positions, 0))
            )
        )
        yield name, layouts.scored(whole, texts, filled, size.batch, place)
    if longer:
        yield "two texts in a row", found(layouts.laid_out(texts, 2 * t, 2), 2 * t, size.batch)
        yield "padded on the right", found(layouts.laid_out(texts, 2 * t), 2 * t, size.batch)
        yield "padded on the left", found(layouts.laid_out(texts, 2 * t, shift=t), 2 * t, size.batch)


def _whole(read: Any, score: Score, empty: Any, state: Any, *given: Any) -> jax.Array:
    return layouts.whole(functools.partial(read, state), score, empty, *given)


def _split(mesh: Mesh, x: Any) -> Any:
    parts = mesh.shape["model"]
    split = x.ndim == 2 and x.shape[-1] % parts == 0 and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "model") if split else PartitionSpec()))


def sampler_forms(side: Side, texts: Texts, size: Size, longer: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """Name and log-probabilities of each form of the sampler; with NaN for texts that it did not read."""
    yield f"{size.slots} slots, refilled", slots(side, texts, size, size.slots)[1]
    few = max(2, size.slots // 9)
    yield f"{few} slots, each begins later", slots(side, texts, size, few, delay=1)[1]
    part = texts.part(0, -(-len(texts.tokens) // size.alone))
    logs = np.full((len(texts.tokens), size.length - 1), np.nan, np.float32)
    logs[: len(part.tokens)] = slots(side, part, size, 1)[1]
    yield "1 slot", logs
    if longer:
        yield f"{size.slots} slots, cache twice as long", slots(side, texts, size, size.slots, 2 * size.length)[1]


def compared(kind: str, form: str, logs: np.ndarray, reference: np.ndarray, texts: Texts, prompt: int) -> Row:
    """The log-probabilities of the written tokens beside those of the trainer."""
    inside = texts.scored & (np.arange(logs.shape[1])[None] + 1 >= prompt)
    inside &= ~np.isnan(logs).all(axis=1, keepdims=True)
    a, b = logs[inside], reference[inside]
    assert np.isfinite(b).all()
    differ = a.view(np.int32) != b.view(np.int32)
    return Row(kind, form, len(a), int(differ.sum()), float(np.abs(a - b).max(initial=0)))


def rows(size: Size, kinds: tuple[str, ...] = KINDS, longer: bool = True) -> Iterator[Row]:
    """Every form of every kind. The tokens are those that the exact model drew."""
    model = trained(size)
    qmodel = calibrated(model, size)
    sides = {kind: side_of(kind, model, qmodel, size, longer) for kind in {"exact": 0, **dict.fromkeys(kinds)}}
    texts, logs = drawn(sides["exact"], size)
    for kind in kinds:
        forms = trainer_forms(sides[kind], texts, size, longer)
        _, reference = next(forms)
        if kind == "exact":
            yield compared(kind, "as they were drawn", logs, reference, texts, size.prompt)
            again, _ = slots(sides[kind], texts, size, size.slots // 2, draw=True)
            inside = np.arange(size.length)[None] < texts.lengths[:, None]
            other = int(((again != texts.tokens) & inside).sum())
            yield Row(kind, f"tokens drawn in {size.slots // 2} slots", int(inside.sum()), other, math.nan)
        for form, found in forms:
            yield compared(kind, "trainer: " + form, found, reference, texts, size.prompt)
        for form, found in sampler_forms(sides[kind], texts, size, longer):
            yield compared(kind, "sampler: " + form, found, reference, texts, size.prompt)


def table(found: list[Row]) -> str:
    """How many differ, and by how much at most, as a Markdown table: a row for each form, a column for each kind."""
    kinds, forms = list(dict.fromkeys(row.kind for row in found)), dict.fromkeys(row.form for row in found)
    cells = {(row.form, row.kind): row for row in found}
    lines = ["| form | tokens | " + " | ".join(kinds) + " |", "| --- | ---: |" + " ---: |" * len(kinds)]
    for form in forms:
        own = [cells.get((form, kind)) for kind in kinds]
        tokens = next(row.tokens for row in own if row is not None)
        shown = ["" if r is None else f"{r.differ:,} ({r.most:.2g})" if r.differ else "0" for r in own]
        lines.append(f"| {form} | {tokens:,} | {' | '.join(shown)} |")
    return "\n".join(lines)
