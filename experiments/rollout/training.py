"""Reinforcement learning of sums of digits, "3+4=07", with four pairs of a sampler and a trainer.

REINFORCE with the baseline of a group, as in GRPO with one update per batch: of several answers to one question each
has the advantage (reward - mean) / standard deviation. Where the sampler's and the trainer's probabilities of an answer
differ, the update is not on policy. The usual correction weights each token by exp(trainer's - sampler's), at most 2.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.rollout import layouts
from experiments.rollout.decoder import Decoder, recipe, sample_call

PROMPT, LENGTH = 4, 6
KINDS = (
    "exact",
    "fake-quantized",
    "fake-quantized, corrected",
    "float, int8 sampler",
    "float, int8 sampler, corrected",
)
GREATEST_WEIGHT = 2.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """questions, answers: of a batch, and of each question. known: the share of right answers before the training."""

    width: int = 32
    layers: int = 2
    questions: int = 16
    answers: int = 8
    updates: int = 100
    rate: float = 2e-3
    before: int = 600
    known: float = 0.3

    @property
    def rows(self) -> int:
        return self.questions * self.answers


@dataclasses.dataclass
class Row:
    """One update. differ: of the drawn tokens, how many log-probabilities the trainer computes with other bits.

    ratio: the importance ratio that is furthest from 1.
    """

    kind: str
    seed: int
    update: int
    reward: float
    tokens: int
    differ: int
    ratio: float
    seconds: float


def questions(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts with their right answers, int32 [count, 6]; and the sums."""
    a, b = rng.integers(0, 10, (2, count))
    texts = np.array([list(f"{x}+{y}={x + y:02d}".encode()) for x, y in zip(a, b, strict=True)], np.int32)
    return texts, a + b


def whole_call(model: Decoder, tokens: Any) -> tuple[Any, ...]:
    """Whole texts with an empty cache."""
    return tokens, *sample_call(model, LENGTH, LENGTH, len(tokens))[1:]


def taught(setting: Setting, seed: int) -> Decoder:
    """A float decoder that answers rightly about as often as its texts do."""
    model = Decoder(setting.width, setting.layers, LENGTH, seed=seed)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    rng = np.random.default_rng(seed)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> None:
        def loss(m: Any) -> jax.Array:
            scores, _ = m(*whole_call(model, tokens))
            losses = optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:])
            return losses[:, PROMPT - 1 :].mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(setting.before):
        tokens, _ = questions(rng, 128)
        wrong = rng.random(128) > setting.known
        tokens[wrong, PROMPT:] = questions(rng, int(wrong.sum()))[0][:, PROMPT:]
        step(model, optimizer, tokens)
    return model


Numbers = dict[str, Any]
"""What a pair computes from: "trained", the parameters, and "fixed", all other numbers of its models."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sampler and a trainer. update: one step of the training. held: what the sampler reads, made once per update.

    read, score, cache: of the sampler.
    """

    update: Callable[..., Any]
    held: Callable[[Numbers], Any]
    read: layouts.Read
    score: layouts.Score
    cache: Callable[[Any], Any]


def numbers_of(kind: str, model: Decoder, qmodel: qjax.QuantizedModel) -> Numbers:
    """The numbers of the models of one seed."""
    _, trained, fixed = nnx.split(model if kind.startswith("float") else qmodel, nnx.Param, ...)
    return {"trained": trained, "fixed": (fixed, nnx.state(qmodel))}


def pair(kind: str, model: Decoder, qmodel: qjax.QuantizedModel, setting: Setting) -> Pair:
    """The pair for models of this structure, whose numbers come with each call."""
    definition, _, _ = nnx.split(model if kind.startswith("float") else qmodel, nnx.Param, ...)
    quantized, _ = nnx.split(qmodel)

    def merged(numbers: Numbers) -> Any:
        return nnx.merge(definition, numbers["trained"], numbers["fixed"][0])

    def update_by(call: Callable[..., Any], score: layouts.Score) -> Callable[..., Any]:
        def logs(trained: Any, fixed: Any, tokens: jax.Array) -> jax.Array:
            scores, _ = call(merged({"trained": trained, "fixed": fixed}), *whole_call(model, tokens))
            return score(scores[:, :-1], tokens[:, 1:])

        return functools.partial(
            jax.jit(_update, static_argnames=("logs", "rate", "corrected")), logs=logs, rate=setting.rate
        )

    def plain(own: Any, *call: Any) -> Any:
        return own(*call)

    def fake(numbers: Numbers, *call: Any) -> Any:
        return merged(numbers)(*call)

    empty = functools.partial(model.empty, setting.rows, LENGTH)
    if kind.startswith("fake"):
        score = layouts.float_score
        return Pair(update_by(plain, score), lambda numbers: numbers, fake, score, lambda held: empty())
    step = qjax.exact(qmodel, sample_call(model, 1, LENGTH), state=("cache", 1))
    coded = jax.jit(lambda constants: constants.state(empty()))
    if kind == "exact":
        forward = qjax.exact(qmodel, sample_call(model, LENGTH, LENGTH), state=("cache", 1))
        derive = jax.jit(lambda numbers: step.constants(merged(numbers)))
        return Pair(update_by(forward, qjax.log_probs), derive, step, qjax.log_probs, coded)

    @jax.jit
    def refresh(numbers: Numbers) -> Any:
        copy = nnx.merge(quantized, numbers["fixed"][1])
        nnx.update(copy.model, numbers["trained"])
        return step.constants(copy)

    return Pair(update_by(plain, layouts.float_score), refresh, step, qjax.log_probs, coded)


def _update(
    numbers: Numbers,
    state: Any,
    tokens: jax.Array,
    sampled: jax.Array,
    advantages: jax.Array,
    *,
    logs: Callable[..., jax.Array],
    rate: float,
    corrected: bool,
) -> Any:
    """The changed numbers, the optimizer's next state, and the trainer's log-probabilities."""

    def loss(trained: Any) -> tuple[jax.Array, jax.Array]:
        own = logs(trained, numbers["fixed"], tokens)
        ratio = jnp.exp(jax.lax.stop_gradient(own) - sampled)
        weight = jnp.minimum(ratio, GREATEST_WEIGHT) if corrected else jnp.ones_like(ratio)
        gains = weight * advantages[:, None] * own
        return -jnp.mean(gains[:, PROMPT - 1 :]), own

    (_, own), gradients = jax.value_and_grad(loss, has_aux=True)(numbers["trained"])
    changes, state = optax.adam(rate).update(gradients, state, numbers["trained"])
    return {**numbers, "trained": optax.apply_updates(numbers["trained"], changes)}, state, own


def trained(kind: str, own: Pair, numbers: Numbers, setting: Setting, seed: int) -> Iterator[Row]:
    """The rows of one training."""
    state = optax.adam(setting.rate).init(numbers["trained"])
    rng = np.random.default_rng(100 + seed)
    texts = layouts.Texts(np.zeros((setting.rows, LENGTH), np.int32), np.full(setting.rows, LENGTH, np.int32))
    plan = layouts.schedule(texts, setting.rows)
    prompts = np.full(setting.rows, PROMPT, np.int32)
    for number in range(setting.updates):
        start = time.perf_counter()
        asked, sums = questions(rng, setting.questions)
        tokens = np.repeat(asked, setting.answers, axis=0)
        held, key = own.held(numbers), jax.random.key(seed * 100_000 + number)
        written, sampled = layouts.sampled(
            held, own.cache(held), tokens, prompts, plan.text, plan.index, key,
            read=own.read, score=own.score, places=LENGTH, draw=True,
        )  # fmt: skip
        digits = np.asarray(written)[:, PROMPT:] - ord("0")
        reward = (np.repeat(sums, setting.answers) == digits @ [10, 1]) & (digits >= 0).all(1) & (digits < 10).all(1)
        groups = reward.reshape(setting.questions, setting.answers).astype(np.float32)
        spread = groups.std(axis=1, keepdims=True) + np.float32(1e-4)
        advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
        numbers, state, logs = own.update(
            numbers, state, written, sampled, advantages, corrected=kind.endswith("corrected")
        )
        a, b = (np.asarray(x)[:, PROMPT - 1 :] for x in (logs, sampled))
        ratio = np.exp(np.float64(a) - b)
        furthest = float(ratio.flat[np.abs(np.log(ratio)).argmax()])
        differ = int((a.view(np.int32) != b.view(np.int32)).sum())
        seconds = time.perf_counter() - start
        yield Row(kind, seed, number, float(reward.mean()), a.size, differ, furthest, seconds)


def calibrated(model: Decoder, setting: Setting) -> qjax.QuantizedModel:
    """The decoder in eight bits."""
    qmodel = qjax.quantize(model, recipe(LENGTH), sample_call(model, LENGTH, LENGTH))
    rng = np.random.default_rng(9)
    batches = [whole_call(model, questions(rng, 64)[0]) for _ in range(4)]
    qjax.calibrate(qmodel, batches, progress=False)
    qmodel.eval()
    return qmodel


def rows(setting: Setting, seeds: int, path: Path, kinds: tuple[str, ...] = KINDS) -> list[Row]:
    """All rows; those of complete trainings are read from the file, and new ones are added to it."""
    found = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    count = {(kind, seed): 0 for kind in kinds for seed in range(seeds)}
    for row in found:
        if (row.kind, row.seed) in count:
            count[row.kind, row.seed] += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs: dict[str, Pair] = {}
    for seed in range(seeds):
        missing = [kind for kind in kinds if count[kind, seed] < setting.updates]
        if not missing:
            continue
        model = taught(setting, seed)
        qmodel = calibrated(model, setting)
        for kind in missing:
            name = kind.removesuffix(", corrected")
            pairs[name] = pairs.get(name) or pair(name, model, qmodel, setting)
            made = list(trained(kind, pairs[name], numbers_of(kind, model, qmodel), setting, seed))
            with path.open("a") as file:
                file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in made)
            found += made
            print(f"{kind}, seed {seed}: reward {np.mean([row.reward for row in made[-10:]]):.3f}", flush=True)
    return [row for row in found if (row.kind, row.seed) in count]


def table(found: list[Row], every: int = 20) -> str:
    """Mean rewards over seeds, and what differed over the whole training."""
    updates = 1 + max(row.update for row in found)
    stops = [*range(0, updates - every + 1, every)]
    heads = [f"updates {start} to {start + every - 1}" for start in stops]
    lines = [
        "| sampler and trainer | " + " | ".join(heads) + " | tokens | differ | furthest ratio |",
        "| --- |" + " ---: |" * (len(heads) + 3),
    ]
    for kind in dict.fromkeys(row.kind for row in found):
        own = [row for row in found if row.kind == kind]
        means = [np.mean([r.reward for r in own if start <= r.update < start + every]) for start in stops]
        ratio = max((row.ratio for row in own), key=lambda r: abs(np.log(r)))
        cells = [f"{mean:.3f}" for mean in means]
        total, differ = sum(row.tokens for row in own), sum(row.differ for row in own)
        lines.append(f"| {kind} | {' | '.join(cells)} | {total:,} | {differ:,} | {ratio:.6g} |")
    return "\n".join(lines)
