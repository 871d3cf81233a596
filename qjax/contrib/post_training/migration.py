"""Moves per-channel factors between a tensor and the weights that read it, so that both quantize with less error.

A tensor has one scale, so a wide channel leaves few codes for the narrow ones. Dividing channel c by s_c and
multiplying the weights that read it by s_c changes no result (`qjax.training.pairs`). It costs nothing at run time,
because existing parameters absorb s.

| s_c, before normalising to a geometric mean of 1 | source |
| --- | --- |
| sqrt(r1_c / r2_c), ranges of the weights before and after | cross-layer equalisation, Nagel et al. 2019, eq. 11 |
| max abs x_c ^ a / max abs W_c ^ (1 - a) | SmoothQuant, Xiao et al. 2023, eq. 4 |
| (mean abs x_c) ^ a | AWQ, Lin et al. 2024, eq. 5 |

Sources: arXiv 1906.04721, 2211.10438 and 2306.00978. The strength a is searched for each pair. A candidate's score is
the error of the layers that read the tensor, with the tensor and their weights quantized. The best candidate of a pair
is then judged at the model's output, on other examples and together with all earlier pairs. A pair that does not reduce
the noise there is not changed.

With `state=`, factors also move between a key-value cache and the weights around it (`qjax.training.caches`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import calibration
from qjax.api.calibrate import calibrate
from qjax.calibration.learned import Quantizer
from qjax.contrib.post_training.caches import move_states
from qjax.contrib.post_training.layerwise_runner import Stop, Stream, Walk
from qjax.contrib.post_training.migration_result import Migration, Moved
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.pairs import Pair, find_pairs, input_axis
from qjax.contrib.post_training.products import Product
from qjax.contrib.post_training.simulated import Grid, grid_of, rounded_to
from qjax.graph.state import Asked
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.affine import choose_qparams
from qjax.support.batches import Batches, Inputs
from qjax.support.progress import track
from qjax.training.weights import parameters

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
GAIN = 0.8
"""A scale is a candidate only if the error of the layers reading it falls below this fraction of its earlier value."""
GAIN_TOGETHER = 0.995
"""A candidate is accepted only if the noise at the model's output falls below this fraction of its earlier value."""
EXAMPLES = 16
"""How many examples judge, both of those that the search has seen and of others."""
MARGIN = 1.1
"""How far a channel must stay below a clip, as a factor on the greatest number in the calibration data."""


def equalize(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    state: Asked | None = None,
    progress: bool | None = None,
) -> Migration:
    """Balance the ranges of channels between consecutive dense layers, convolutions and depthwise convolutions.

    Through relu, leaky relu and batch norm the float function does not change. Through a clip (relu6) it does not
    change for inputs whose channels stay below the clip, as those of the calibration data do with a margin of a tenth.

    With a state (a key-value cache), factors also move between keys and queries, and between values and the output
    projection: one for each head and channel, as far as the model allows it. The float function does not change for an
    empty cache, nor for one that the model has filled itself. The cache then holds other units; `result.state` converts
    a cache of the original float model.

    Args:
      qmodel: its parameters are changed, and it is calibrated again on these batches.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: a model with the same parameters, which are changed in the same way.
      state: as for `qjax.convert`: the argument that is a cache. Without it no factor moves through a cache.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: there is no batch, no such state, or no pair; the message gives the reason for each layer.

    Examples:
      ```python
      print(qjax.training.equalize(qmodel, batches))
      ```
    """
    return _migrate_once("equalize", qmodel, batches, inputs, reference, progress, norm=False, state=state)


def smooth(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    reference: QuantizedModel | None = None,
    progress: bool | None = None,
) -> Migration:
    """Move factors between a norm's scale and bias and the layers that read it, as in SmoothQuant and AWQ.

    The float function does not change. Arguments and errors are those of `equalize`.

    Args:
      qmodel: its parameters are changed, and it is calibrated again on these batches.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. They stay in
        memory.
      inputs: picks the model's arguments out of a batch: `lambda batch: batch[0]` for pairs of images and labels.
      reference: a model with the same parameters, which are changed in the same way.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Examples:
      ```python
      model = nnx.Sequential(
          nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(0))
      )
      qmodel = qjax.quantize(model, recipe, x)
      print(qjax.training.smooth(qmodel, batches))
      ```
    """
    return _migrate_once("smooth", qmodel, batches, inputs, reference, progress, norm=True)


def _migrate_once(
    what: str,
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    inputs: Inputs | None,
    reference: QuantizedModel | None,
    progress: bool | None,
    *,
    norm: bool,
    state: Asked | None = None,
) -> Migration:
    check_quantized(qmodel, what)
    kept = list(Batches(batches, inputs, what).arguments())
    models = [qmodel] if reference is None else [qmodel, reference]
    found = migrate(models, Walk(qmodel, kept), kept, norm=norm, state=state, progress=progress)
    if not found.moved and not found.kept:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.left.items()) or "it has no quantized weight"
        raise ValueError(f"{what}: expected layers between which a scale can move, got none. {reasons}.")
    return found


def migrate(
    models: Sequence[QuantizedModel],
    walk: Walk,
    batches: Sequence[tuple[Any, ...]],
    *,
    norm: bool,
    state: Asked | None = None,
    progress: bool | None = None,
) -> Migration:
    """Move the factors in all `models` alike; the first is the quantized one, which is calibrated again."""
    qmodel = models[0]
    names = tuple(item.name for item in walk.items)
    pairs, left = find_pairs(evaluation_copy(qmodel).trace(*batches[0]), names)
    known = {product.name: pair for pair in pairs for product in pair.read if pair.norm == norm}
    left = {**walk.left, **left}
    left |= {product.name: _OTHER[norm] for pair in pairs if pair.norm != norm for product in pair.read}
    reals = Stream.of(models[-1], quantized=False)
    seen, held = held_out(batches)
    found: list[tuple[_Search, str, np.ndarray]] = []
    done = set[Pair]()

    def visit(stop: Stop) -> None:
        pair = known.get(stop.product.name)
        if pair is None or pair in done:
            return
        done.add(pair)
        search = _Search(qmodel, pair, stop.data[0], reals.parameters)
        way, scale = search.best()
        if way is not None:
            found.append((search, way, scale))

    if known:
        walk.run([reals], seen, visit, what="move scales: layer", progress=progress)
    together = _Together(qmodel, walk, reals, [_some(seen), _some(held)])
    moved: list[Moved] = []
    for search, way, scale in track(found, "judge moved scales: pair", enabled=progress):
        noises = together.tried(search, scale)
        if noises is None:
            continue
        pair = search.pair
        for model in models:
            move(model, pair, scale)
        made, read = tuple(m.path for m in pair.made), tuple(p.name for p in pair.read)
        moved.append(Moved(made, read, way, *noises, float(scale.max() / scale.min())))
    kept, units = len(done) - len(moved), None
    if state is not None:
        groups = [_some(seen), _some(held)]
        caches = move_states(models, walk, seen, groups, state, least=GAIN_TOGETHER, progress=progress)
        moved += [Moved(*one) for one in caches.taken]
        kept, left, units = kept + caches.tried - len(caches.taken), {**left, **caches.left}, caches.units
        batches = [units.arguments(args) for args in batches]
    if moved or state is not None:
        calibrate(qmodel, list(batches), progress=False)
    return Migration(tuple(moved), kept, left, units)


def held_out(batches: Sequence[tuple[Any, ...]]) -> tuple[Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]]]:
    """(batches that make candidates, batches that judge them): the latter is the last quarter, or the single batch."""
    count = max(1, len(batches) // 4)
    return (batches[:-count], batches[-count:]) if len(batches) > 1 else (batches, batches)


class _Together:
    """Accepts one pair after the other, by the noise at the model's output together with all accepted pairs.

    The noise must fall on each of several groups of examples.

    The error of a single layer does not predict the effect on the model: channels may grow into a clip that other
    inputs reach, or the weights may lose more than the tensor gains.
    """

    def __init__(
        self, qmodel: QuantizedModel, walk: Walk, reals: Stream, groups: Sequence[Sequence[tuple[Any, ...]]]
    ) -> None:
        self._qmodel, self._walk, self._groups = qmodel, walk, groups
        self._stream = Stream.of(qmodel)
        self._truth = [walk.outputs(reals, group) for group in groups]
        self._noise = self._of(self._stream)

    def tried(self, search: "_Search", scale: np.ndarray) -> tuple[float, float] | None:
        """The noise before and with the scales of a pair; None, and no change, if it does not fall."""
        parameters, grids = dict(self._stream.parameters), dict(self._stream.grids)
        for path, axis, factors in touched(search.pair, scale):
            parameters[path] = multiplied(parameters[path], axis, factors)
        quantizers = self._qmodel.plan.by_name
        for path, _, _ in touched(search.pair, scale):
            if "scale" in grids.get(path, {}):
                q = quantizers[path]
                grids[path] = grid_of(q, calibration.weight_qparams(np.asarray(parameters[path], np.float32), q.spec))
        name = search.pair.quantizer
        if name is not None and "scale" in grids[name] and quantizers[name].fixed is None:
            grids[name] = search.grid(quantizers[name], scale)
        changed = Stream(parameters, grids)
        noise, before = self._of(changed), self._noise
        if not np.all(noise < GAIN_TOGETHER * before):
            return None
        self._stream, self._noise = changed, noise
        return float(before.max()), float(noise.max())

    def _of(self, stream: Stream) -> np.ndarray:
        pairs = zip(self._truth, self._groups, strict=True)
        return np.asarray([noise_of(truth, self._walk.outputs(stream, group)) for truth, group in pairs])


def _some(batches: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
    """The first batches with about `EXAMPLES` examples."""
    size = next((x.shape[0] for x in jax.tree.leaves(batches[0]) if getattr(x, "ndim", 0)), 1)
    return batches[: max(1, EXAMPLES // size)]


_OTHER = {True: "no norm makes its input (equalize)", False: "a norm makes its input (smooth)"}


def move(qmodel: QuantizedModel, pair: Pair, scale: np.ndarray) -> None:
    """Divide a pair's tensor by `scale` [channels], in the parameters around it."""
    for path, axis, factors in touched(pair, scale):
        (variable,) = parameters(qmodel, [path]).values()
        variable[...] = multiplied(variable[...], axis, factors)


def touched(pair: Pair, scale: np.ndarray) -> list[tuple[str, int, np.ndarray]]:
    """(parameter, axis, factors along it) for everything that a pair's scales change."""
    found = [(made.path, made.axis, 1 / scale) for made in pair.made]
    for product in pair.read:
        axes = input_axis(product)
        assert axes is not None
        found.append((product.name, axes[1], scale))
    return found


def multiplied(value: Any, axis: int, factors: np.ndarray) -> Any:
    """A parameter times factors along an axis, in the parameter's dtype."""
    old = np.asarray(value, np.float64)
    return jnp.asarray(old * _along(factors, axis, old.shape), value.dtype)


def _along(factors: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """Factors [channels] in the shape of a tensor; a depthwise kernel has several filters for each channel."""
    repeated = np.repeat(factors, shape[axis] // len(factors))
    return repeated.reshape([-1 if i == axis else 1 for i in range(len(shape))])


class _Search:
    """The candidates for one pair, judged on a sample of the rows that its readers multiply."""

    def __init__(self, qmodel: QuantizedModel, pair: Pair, data: Sequence[Any], parameters: Mapping[str, Any]) -> None:
        self.pair, plan = pair, qmodel.plan
        found = input_axis(pair.read[0])
        assert found is not None
        (self._axis, _) = found
        self._x = np.concatenate([_sample(np.asarray(x, np.float32), len(data)) for x in data])
        channels = np.moveaxis(np.concatenate([np.asarray(x, np.float32) for x in data]), self._axis, -1)
        channels = channels.reshape(-1, channels.shape[-1])
        self._low, self._high = channels.min(0).astype(np.float64), channels.max(0).astype(np.float64)
        self._greatest = np.maximum(np.abs(self._low), np.abs(self._high))
        self._mean = np.abs(channels).mean(0, dtype=np.float64)
        self._spec = None if pair.quantizer is None else plan.by_name[pair.quantizer].spec
        self._weights = [(p, np.asarray(parameters[p.name], np.float32), plan.by_name[p.name]) for p in pair.read]
        reach = [self._reach(product, w) for product, w, _ in self._weights]
        self._reach_of_weights = np.max(reach, axis=0)
        self._front = self._front_of(parameters)
        self._truth = [np.asarray(product(jnp.asarray(self._x), jnp.asarray(w))) for product, w, _ in self._weights]

    def _reach(self, product: Product, w: np.ndarray) -> np.ndarray:
        """[channels]: the greatest magnitude of the weights that read a channel."""
        found = input_axis(product)
        assert found is not None
        moved = np.moveaxis(np.abs(w), found[1], 0).reshape(self.pair.channels, -1)
        return moved.max(1).astype(np.float64)

    def _front_of(self, parameters: Mapping[str, Any]) -> np.ndarray:
        made = self.pair.made[0]
        w = np.abs(np.asarray(parameters[made.path], np.float64))
        return np.moveaxis(w, made.axis, 0).reshape(self.pair.channels, -1).max(1)

    def best(self) -> tuple[str | None, np.ndarray]:
        """(formula or None, scales) with the least error of the readers."""
        ones = np.ones(self.pair.channels)
        way, scale, least = None, ones, self._error(ones) * GAIN
        for name, candidate in self._candidates():
            error = self._error(candidate)
            if error < least:
                way, scale, least = name, candidate, error
        return way, scale

    def grid(self, q: Quantizer, scale: np.ndarray) -> Grid:
        """The numbers of the tensor's quantizer for the new range."""
        low, high = (self._low / scale).min(), (self._high / scale).max()
        return grid_of(q, choose_qparams(np.float32(min(low, 0)), np.float32(max(high, 0)), q.spec))

    def _candidates(self) -> list[tuple[str, np.ndarray]]:
        with np.errstate(all="ignore"):
            found = [("weights 0.5", np.sqrt(self._front / self._reach_of_weights))]
            found += [(f"smooth {a:g}", self._greatest**a / self._reach_of_weights ** (1 - a)) for a in STRENGTHS]
            found += [(f"mean {a:g}", self._mean**a) for a in STRENGTHS[:2]]
        return [(name, self._allowed(scale)) for name, scale in found]

    def _allowed(self, scale: np.ndarray) -> np.ndarray:
        good = np.isfinite(scale) & (scale > 0)
        if not good.any():
            return np.ones_like(scale)
        scale = np.where(good, scale, 1.0)
        middle = np.exp(np.mean(np.log(scale[good])))
        # A channel without data or without weights keeps its scale.
        scale = np.where(good, np.clip(scale / middle, 1e-4, 1e4), 1.0)
        cap = self.pair.capped
        if cap is None:
            return scale
        # Channels may grow up to the bound of the clip. Those that reach it do not change.
        scale = scale / scale.max()
        room = np.minimum(1.0, MARGIN * self._high / cap)
        return np.where(self._high < cap, np.clip(scale, np.maximum(room, 1e-4), 1.0), 1.0)

    def _error(self, scale: np.ndarray) -> float:
        """The error of all readers together, relative to their outputs."""
        x = self._x / _along(scale, self._axis, self._x.shape).astype(np.float32)
        if self._spec is not None:
            q = Quantizer(self._spec, "static", self._x.shape[1:])
            x = rounded_to(q, self.grid(q, scale), jnp.asarray(x, jnp.float32))
        noise = signal = 0.0
        for (product, w, q), y in zip(self._weights, self._truth, strict=True):
            found = input_axis(product)
            assert found is not None
            moved = (w * _along(scale, found[1], w.shape)).astype(np.float32)
            grid = grid_of(q, calibration.weight_qparams(moved, q.spec))
            y_q = np.asarray(product(jnp.asarray(x, jnp.float32), rounded_to(q, grid, jnp.asarray(moved))))
            noise += float(np.sum(np.square(y.astype(np.float64) - y_q)))
            signal += float(np.sum(np.square(y.astype(np.float64))))
        return noise / signal if signal else 0.0


def _sample(x: np.ndarray, batches: int) -> np.ndarray:
    """The first examples of a batch, such that all batches together have a few; the product accepts any number."""
    count = max(1, -(-8 // batches))
    return x[:count]
