"""Block reconstruction: learned rounding of all layers of a block together (BRECQ, Li et al. 2021, arXiv 2102.05426).

AdaRound preserves the output of each layer. What matters is what a block passes to the next one, because errors of its
layers can cancel, and errors that a ReLU hides cost nothing. A block is a part of the program between two points where
a single tensor is alive, such as a residual block. Blocks are found in the traced program, whatever the layers' names.

Each block learns from its true inputs, as the quantized blocks before it compute them. As in QDrop (Wei et al. 2022,
arXiv 2203.05740) activations are quantized at random: at each step about half of the elements of the block's input and
half of the tensors inside it. This prevents the rounding from fitting one pattern of errors.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qjax.contrib.post_training.adaround import Options, annealed, rectified_sigmoid
from qjax.contrib.post_training.layerwise_runner import Pieces, Stream, Walk
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.support.batches import Batches, Inputs
from qjax.support.progress import track
from qjax.support.tables import decibels_text, table
from qjax.training.weights import code_bounds, codes_of, parameters, quantized_weights, set_codes

Tensors = list[jax.Array]
"""The tensors that are alive between two blocks."""


class Block:
    """One block of the model, for every batch of a list.

    Attributes:
      names: of the weights of its layers.
      parameters: the paths of all parameters that it reads.
      quantizers: the quantizers inside it.
    """

    def __init__(self, pieces: Sequence[Pieces], first: int, last: int) -> None:
        self._pieces, self._range = pieces, range(first, last + 1)
        self.names = tuple(pieces[0].items[i - 1].name for i in self._range if i)
        reads = [pieces[0].reads(i) for i in self._range]
        self.parameters = list(dict.fromkeys(path for paths, _ in reads for path in paths))
        self.quantizers = list(dict.fromkeys(name for _, names in reads for name in names))

    def __call__(self, batch: int, stream: Stream, tensors: Tensors) -> Tensors:
        """The tensors alive after the block; pure JAX in the tensors and in the stream's numbers."""
        pieces = self._pieces[batch]
        live = dict(zip(pieces.entering(self._range[0]), tensors, strict=True))
        for index in self._range:
            live = pieces.step(index, stream, live)
        return [live[value] for value in pieces.entering(self._range[-1] + 1)]

    def alike(self, a: int, b: int) -> bool:
        """Whether two batches have the same shapes."""
        return self._pieces[a] is self._pieces[b]


def blocks_of(walk: Walk, batches: Sequence[tuple[Any, ...]]) -> tuple[list[Block], list[Tensors]]:
    """The blocks in the order of execution, and for every batch the input of the first one."""
    pieces = [walk.pieces(args) for args in batches]
    last = len(walk.items)
    starts = [0, *(i for i in range(1, last + 1) if pieces[0].single(i)), last + 1]
    blocks = [Block(pieces, a, b - 1) for a, b in itertools.pairwise(starts)]
    entering = [list(one.start(args).values()) for one, args in zip(pieces, batches, strict=True)]
    return blocks, entering


DROP = 0.5
"""The share of activations that stay in float at a step."""


@dataclasses.dataclass(frozen=True)
class RebuiltBlock:
    """The result for one block.

    Attributes:
      names: of the weights of its layers.
      before, after: `sum (y - y_q)^2 / sum y^2` of its output on examples that were not used for learning.
      changed, weights: how many codes changed, out of how many.
    """

    names: tuple[str, ...]
    before: float
    after: float
    changed: int
    weights: int


@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """The result of `brecq`; `str()` is a table.

    Attributes:
      blocks: in the order of execution.
      left: weights that did not change -> why.
    """

    blocks: tuple[RebuiltBlock, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        rows = [
            [
                f"{one.names[0]}{f' and {len(one.names) - 1} more' if len(one.names) > 1 else ''}",
                decibels_text(one.before),
                decibels_text(one.after),
                f"{one.changed} of {one.weights}",
            ]
            for one in self.blocks
        ]
        text = table(["weights", "before, dB", "after, dB", "codes changed"], rows)
        return "\n".join([text, *(f"{name}: left, {why}" for name, why in self.left.items())])


def brecq(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    steps: int = 300,
    learning_rate: float = 2e-2,
    regularization: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Reconstruction:
    """Round the weights of each block up or down such that the block's output changes least.

    It starts from the present codes of the weights, such as those of `gptq`. A block keeps what it learned only if this
    improves its output on the last quarter of the batches, which are not used for learning. Scales do not change.

    Args:
      qmodel: the quantized model; it is changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory. Each step uses one batch, so several small ones are better than a large one.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: the model whose parameters, without quantizers, are the float model's; None is `qmodel` as it is.
      steps: of Adam, for each block.
      learning_rate: of Adam.
      regularization: the weight of the term that moves each weight to one of its two codes, see `adaround`.
      seed: of the order of the batches, and of the random choice of what is quantized at a step.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Returns:
      Each block's error before and after.

    Raises:
      ValueError: there is no batch, or no dense layer or convolution whose weight is an unchanged parameter.

    Examples:
      ```python
      print(qjax.training.brecq(qmodel, batches, steps=20))
      ```
    """
    check_quantized(qmodel, "brecq")
    kept = list(Batches(batches, inputs, "brecq").arguments())
    walk = Walk(qmodel, kept)
    if not walk.items:
        reasons = "; ".join(f"{name}: {why}" for name, why in walk.left.items()) or "it has no quantized weight"
        raise ValueError(f"brecq: expected a dense layer or a convolution, got none. {reasons}.")
    options = Options(steps, learning_rate, regularization)
    return rebuild(qmodel, reference or qmodel, walk, kept, options, seed=seed, progress=progress)


def rebuild(
    qmodel: QuantizedModel,
    reference: QuantizedModel,
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    options: Options,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> Reconstruction:
    """`brecq` along a walk that has been compiled already."""
    own, reals = Stream.of(qmodel), Stream.of(reference, quantized=False)
    rng = np.random.default_rng(seed)
    found: list[RebuiltBlock] = []
    blocks, entering = blocks_of(walk, batches)
    lives = [[[jnp.asarray(x) for x in tensors] for tensors in entering] for _ in range(2)]
    for block in track(blocks, "rebuild: block", enabled=progress):
        wanted = [block(index, reals, live) for index, live in enumerate(lives[1])]
        if block.names:
            found.append(_rebuild_block(qmodel, block, own, reals, lives, wanted, options, rng))
        lives = [[block(index, own, live) for index, live in enumerate(lives[0])], wanted]
    return Reconstruction(tuple(found), dict(walk.left))


def _rebuild_block(
    qmodel: QuantizedModel,
    block: Block,
    own: Stream,
    reals: Stream,
    lives: Sequence[Sequence[Tensors]],
    wanted: Sequence[Tensors],
    options: Options,
    rng: np.random.Generator,
) -> RebuiltBlock:
    """Learn one block's codes and store them, in the model and in its stream."""
    held = max(1, len(wanted) // 4) if len(wanted) > 1 else 0
    learn = range(len(wanted) - held)
    judge = range(len(wanted) - held, len(wanted)) if held else learn
    rounding = _Rounding(qmodel, block.names, reals)

    def error(stream: Stream) -> float:
        pairs = [_difference(block(i, stream, lives[0][i]), wanted[i]) for i in judge]
        return float(sum(noise for noise, _ in pairs) / max(sum(power for _, power in pairs), 1e-30))

    before = error(own)
    learned = _learn(block, own, rounding, lives, wanted, [i for i in learn if block.alike(i, 0)], before, options, rng)
    codes = rounding.codes(learned)
    variables = parameters(qmodel, block.names)
    old = {name: variable[...] for name, variable in variables.items()}
    set_codes(qmodel, codes)
    for name, variable in variables.items():
        own.take(name, variable)
    after = error(own)
    changed = sum(int((codes[name] != rounding.now[name]).sum()) for name in block.names)
    if not after < before:
        for name, variable in variables.items():
            variable[...] = old[name]
            own.take(name, variable)
        after, changed = before, 0
    return RebuiltBlock(block.names, before, after, changed, sum(code.size for code in codes.values()))


class _Rounding:
    """The two codes between which each weight of a block learns, and the starting point."""

    def __init__(self, qmodel: QuantizedModel, names: Sequence[str], reals: Stream) -> None:
        self.now = {name: np.asarray(code) for name, code in codes_of(qmodel, names).items()}
        self.start: dict[str, jax.Array] = {}
        self.numbers: dict[str, tuple[np.ndarray, ...]] = {}
        for name, grid in quantized_weights(qmodel, names).items():
            code = self.now[name].astype(np.float64)
            scale = np.broadcast_to(np.asarray(grid.scale), code.shape)
            low, high = (np.asarray(end) for end in code_bounds(grid))
            # One of the two is the present code. The other one lies on the side of the float weight.
            part = np.asarray(reals.parameters[name], np.float64) / scale - code
            floor = np.where(part >= 0, code, code - 1)
            start = np.where(part >= 0, np.clip(part, 0.01, 0.45), np.clip(part + 1, 0.55, 0.99))
            # The inverse of the rectified sigmoid.
            v = -np.log(1.2 / (start + 0.1) - 1)
            self.start[name] = jnp.asarray(v, jnp.float32)
            self.numbers[name] = tuple(np.asarray(a, np.float32) for a in (floor, scale, low, high))

    def soft(self, values: dict[str, jax.Array], numbers: dict[str, Any]) -> dict[str, jax.Array]:
        """The weights between their two codes."""
        found: dict[str, jax.Array] = {}
        for name, v in values.items():
            floor, scale, low, high = numbers[name]
            found[name] = jnp.clip(floor + rectified_sigmoid(v), low, high) * scale
        return found

    def codes(self, values: dict[str, Any]) -> dict[str, np.ndarray]:
        """The nearer of the two codes."""
        found: dict[str, np.ndarray] = {}
        for name, v in values.items():
            floor, _, low, high = self.numbers[name]
            up = np.asarray(rectified_sigmoid(jnp.asarray(v))) >= 0.5
            found[name] = np.clip(floor + up, low, high).astype(np.int32)
        return found


def _learn(
    block: Block,
    own: Stream,
    rounding: _Rounding,
    lives: Sequence[Sequence[Tensors]],
    wanted: Sequence[Tensors],
    learn: Sequence[int],
    unit: float,
    options: Options,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """The values of the rectified sigmoid after the last step."""
    adam = optax.adam(options.rate)
    off = {name: {**own.grids[name], "on": np.zeros_like(own.grids[name]["on"])} for name in block.names}
    free = [name for name in block.quantizers if name not in off and name not in own.parameters]
    fixed = {name: own.grids[name] for name in block.quantizers if name not in free}

    def loss_of(values: dict[str, jax.Array], given: Any, mixed: Tensors, y: Tensors, grids: Any) -> jax.Array:
        numbers, others, weight, beta = given
        soft = rounding.soft(values, numbers)
        stream = Stream({**others, **soft}, grids)
        noise, power = _difference(block(learn[0], stream, mixed), y)
        sure = sum(jnp.mean(1 - jnp.abs(2 * rectified_sigmoid(v) - 1) ** beta) for v in values.values())
        return noise / power / np.float32(max(unit, 1e-9)) + weight * sure / np.float32(len(values))

    @jax.jit
    def step(values: Any, state: Any, given: Any, mixed: Tensors, y: Tensors, grids: Any) -> Any:
        updates, state = adam.update(jax.grad(loss_of)(values, given, mixed, y, grids), state, values)
        return optax.apply_updates(values, updates), state

    others = {path: own.parameters[path] for path in block.parameters if path not in off}
    values: Any = dict(rounding.start)
    # optax promotes dtypes and ranks, which the caller's JAX settings may forbid.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = adam.init(values)
        for index in range(options.steps):
            which = learn[int(rng.integers(len(learn)))]
            weight, beta = annealed(index, options)
            given = rounding.numbers, others, np.float32(weight), np.float32(beta)
            dropped = {n: {**own.grids[n], "on": own.grids[n]["on"] & (rng.random() >= DROP)} for n in free}
            mixed = _mix(lives[0][which], lives[1][which], rng)
            values, state = step(values, state, given, mixed, wanted[which], {**fixed, **dropped, **off})
    return values


def _mix(quantized: Tensors, reals: Tensors, rng: np.random.Generator) -> Tensors:
    """Each float tensor, with about half of its elements from the float model and the others quantized."""
    pairs = zip(quantized, reals, strict=True)
    return [jnp.where(rng.random(x.shape, np.float32) < DROP, y, x) if _is_float(x) else x for x, y in pairs]


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _difference(found: Tensors, wanted: Tensors) -> tuple[Any, Any]:
    """`sum (y - y_q)^2` and `sum y^2` of the float tensors after a block, without infinite elements."""
    noise: Any = jnp.float32(0)
    power: Any = jnp.float32(0)
    for x, y in zip(found, wanted, strict=True):
        if _is_float(y):
            good = jnp.isfinite(y)
            noise = noise + jnp.sum(jnp.square(jnp.where(good, x - y, 0)))
            power = power + jnp.sum(jnp.square(jnp.where(good, y, 0)))
    return noise, power
