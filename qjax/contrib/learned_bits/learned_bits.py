"""Learns how many bits each weight, channel or tensor needs, at a price for the logic that the bits take.

The recipe gives a quantizer a grid of `bits`. Here each weight, and each activation tensor, also learns how many of the
lowest bits of that grid it can drop. A weight whose code becomes 0 is pruned. The method is that of HGQ (Sun et al.
2024, arXiv 2405.00645); `training.dropped_bits` has the formulas.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from qjax.calibration.learned import Quantizer
from qjax.contrib.learned_bits.dropped_bits import bounds, most, quantized, used
from qjax.contrib.learned_bits.resources import magnitude_bits, multiplications, total
from qjax.contrib.post_training.widths import replace_quantizers
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.model.quantizer_numbers import QuantParam
from qjax.numerics.affine import QParams
from qjax.ops import Quantized
from qjax.support.batches import arguments_of, batch_size
from qjax.tracing import Evaluation, Place
from qjax.training.adam import is_within, names_of, paths_of
from qjax.training.weights import parameters, set_codes, unchanged

# ----------------------------------------------------------------------------------------------------------------------
# Narrows the quantizers of a model to the bits that its codes need: the result of `LearnedBits.finish`.
#
# A tensor that drops its k lowest bits gets a step that is 2^k times as large, and k bits less. A weight also loses the
# highest bits that none of its codes uses.


def narrowed(
    qmodel: QuantizedModel, weights: Mapping[str, Quantized], activations: Mapping[str, int]
) -> QuantizedModel:
    """Copy the model such that nothing has more bits than it needs.

    Args:
      qmodel: the model; it is not changed.
      weights: name -> the codes that a weight must have.
      activations: name -> how many of the lowest bits a tensor drops.
    """
    made = nnx.clone(qmodel)
    changed: dict[str, tuple[Quantizer, QParams]] = {}
    codes: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        codes[name] = np.asarray(weight.codes).astype(np.int64)
        greatest = int(np.abs(codes[name]).max(initial=0))
        bits = max(2, 1 + greatest.bit_length())
        changed[name] = _narrow(qmodel.plan.by_name[name], np.asarray(weight.qparams.scale), bits)
    qparams = qmodel.qparams()
    for name, low in activations.items():
        quantizer = qmodel.plan.by_name[name]
        scale = np.asarray(qparams[name].scale) * np.float32(2.0**low)
        changed[name] = _narrow(quantizer, scale, quantizer.spec.bits - low)
    replace_quantizers(made, changed)
    set_codes(made, codes)
    return made


def _narrow(quantizer: Quantizer, scale: np.ndarray, bits: int) -> tuple[Quantizer, QParams]:
    """A quantizer with that many bits and exactly this scale."""
    spec = quantizer.spec.replace(bits=bits)
    moved = QParams(jnp.asarray(scale), jnp.zeros(scale.shape, jnp.int32), spec)
    own = dataclasses.replace(quantizer, spec=spec)
    if not np.array_equal(_scale(own, moved), scale):
        # The parameters of the method, such as a logarithm, cannot represent this scale bit for bit.
        own = dataclasses.replace(own, method="static")
    return own, moved


def _scale(quantizer: Quantizer, qparams: QParams) -> Any:
    parameters = {name: jnp.asarray(value) for name, value in quantizer.init(qparams).items()}
    return np.asarray(quantizer.qparams(parameters).scale)


Per = Literal["weight", "channel", "tensor"]


class BitsParam(QuantParam):
    """How many of the lowest bits are dropped: a real number that is rounded where it is used.

    Examples:
      ```python
      learner = qjax.training.LearnedBits(qmodel, x)
      # for an optimizer with a rate of their own
      bits = nnx.state(learner, qjax.training.BitsParam)
      ```
    """


class LearnedBits(nnx.Module):
    """A quantized model that learns its bits; it is called and trained like the model.

    The loss gets a term for the logic, whose price may grow during training:

        learner = qjax.training.LearnedBits(qmodel, x)
        optimizer = learner.optimizer()

        @nnx.jit
        def step(learner, optimizer, x, labels, price):
            def loss(learner):
                return cross_entropy(learner(x), labels) + price * learner.ebops()

            optimizer.update(learner, nnx.grad(loss)(learner))

    Attributes:
      qmodel: a copy of the given model, whose parameters train.
      dropped: quantizer -> how many of the lowest bits it drops, float32: an array that matches the weight, one number
        per channel, or a single number.
      left: (name, why) of the tensors that multiplications read but whose bits are not learned.
    """

    def __init__(self, qmodel: QuantizedModel, sample: Any, *, per: Per = "channel") -> None:
        """Start with all bits of the recipe; eight are enough for most networks.

        Args:
          qmodel: the quantized model, calibrated. Only codes without a zero point learn: QSpec(symmetric=True).
          sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.
          per: what has bits of its own within a weight. An activation has one number of bits per tensor. "weight" needs
            longer training than "channel".

        Raises:
          ValueError: a product reads a tensor without a quantizer; or no tensor can learn its bits.
        """
        check_quantized(qmodel, "LearnedBits")
        if per not in get_args(Per):
            raise ValueError(f"LearnedBits: per: expected one of {', '.join(get_args(Per))}, got {per!r}.")
        args = arguments_of(sample, "LearnedBits")
        call = evaluation_copy(qmodel).trace(*args)
        products, places = multiplications(call, batch_size(args)), call.annotation.places()
        unchanging = unchanged(call, qmodel.plan, repeated=True)
        variables, left = parameters(qmodel, unchanging.names), dict(unchanging.left)
        found: dict[str, BitsParam] = {}
        refused: dict[str, str] = {}
        for name in dict.fromkeys(name for product in products for name in product.names):
            why = left.get(name) or _refusal(qmodel.plan.by_name[name])
            if why is not None:
                refused[name] = why
            elif places[name].kind == "weight":
                shape = _shape(variables[name][...].shape, places[name].axes, per)
                found[name] = BitsParam(jnp.zeros(shape, jnp.float32))
            else:
                found[name] = BitsParam(jnp.zeros((), jnp.float32))
        if not found:
            why = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "The model multiplies nothing"
            raise ValueError(f"LearnedBits: no tensor can learn its bits. {why}.")
        self.qmodel = nnx.clone(qmodel)
        self.dropped = nnx.Dict(found)
        self.left = tuple(refused.items())
        self.products = products
        self.weights = frozenset(name for name in found if places[name].kind == "weight")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output with the present bits. It traces the model, so put it under `nnx.jit`."""
        call = self.qmodel.trace(*args, **kwargs)
        plan = self.qmodel.plan

        def quantize(place: Place, params: Any, x: jax.Array) -> Quantized:
            if place.name not in self.dropped:
                return call.quantize(place, params, x)
            k, weight = self.dropped[place.name][...], place.kind == "weight"
            return quantized(plan.by_name[place.name], params, x, k, weight=weight, formula=plan.formula_of(place))

        evaluated = call.evaluate(quantize=quantize, evaluation=functools.partial(_Evaluation, limits=self._bounds))
        call.write(evaluated)
        return evaluated.output

    def optimizer(self, learning_rate: Any = 3e-3, *, bits_rate: Any = 1e-2) -> nnx.Optimizer["LearnedBits"]:
        """Adam, with a separate rate for the bits, which have to move by whole units.

        Args:
          learning_rate: of the weights and scales; a number or an optax schedule.
          bits_rate: of `dropped`, in bits per step; a number or an optax schedule.
        """
        kinds: dict[Hashable, optax.GradientTransformation] = {
            "bits": optax.adam(bits_rate),
            "rest": optax.adam(learning_rate),
        }
        own = paths_of(self, BitsParam)

        def kind(path: tuple[Any, ...], _: Any) -> str:
            return "bits" if is_within(names_of(path), own) else "rest"

        transform = optax.multi_transform(kinds, lambda params: jax.tree.map_with_path(kind, params))
        return nnx.Optimizer(self, transform, wrt=nnx.Param)

    def ebops(self) -> jax.Array:
        """The effective bit operations of one example, float32, differentiable; see `qjax.training.ebops`."""
        values = self.qmodel.quantizer_values()
        plan, widths = self.qmodel.plan, dict[str, jax.Array]()
        for name in dict.fromkeys(name for product in self.products for name in product.names):
            widths[name] = jnp.asarray(magnitude_bits(plan.by_name[name].spec), jnp.float32)
            if name in self.weights:
                continue
            if name in self.dropped:
                limit = most(plan.by_name[name].spec, weight=False)
                widths[name] = widths[name] - used(self.dropped[name][...], limit)
        for name, variable in parameters(self.qmodel, sorted(self.weights)).items():
            q, k = plan.by_name[name], self.dropped[name][...]
            codes = lax.stop_gradient(quantized(q, values[name], variable[...], k, weight=True).codes)
            k = used(k, most(q.spec, weight=True))
            bits = _bit_length(jnp.abs(codes)) - (k - lax.stop_gradient(jnp.min(k)))
            widths[name] = jnp.where(codes == 0, jnp.zeros_like(bits), bits)
        return total(self.products, widths)

    def _bounds(self, name: str) -> tuple[jax.Array, jax.Array] | None:
        """The range of codes that an activation may have; None for the full range of its quantizer."""
        if name not in self.dropped or name in self.weights:
            return None
        spec = self.qmodel.plan.by_name[name].spec
        return bounds(spec, used(self.dropped[name][...], most(spec, weight=False)))

    def finish(self) -> QuantizedModel:
        """An ordinary quantized model with the present codes, whose quantizers have no more bits than these need.

        Weights are set to the values of their codes. The learner does not change and can go on training.
        """
        plan, values = self.qmodel.plan, self.qmodel.quantizer_values()
        weights = {
            name: quantized(plan.by_name[name], values[name], variable[...], self.dropped[name][...], weight=True)
            for name, variable in parameters(self.qmodel, sorted(self.weights)).items()
        }
        activations = {
            name: int(used(k[...], most(plan.by_name[name].spec, weight=False)))
            for name, k in self.dropped.items()
            if name not in self.weights
        }
        return narrowed(self.qmodel, weights, activations)


@dataclasses.dataclass(frozen=True)
class _Evaluation(Evaluation):
    """Averages get their codes from the target's own formula; here they are clipped to the remaining bits."""

    limits: Callable[[str], tuple[jax.Array, jax.Array] | None] = lambda name: None

    def averaged(self, place: Place, x: Any, nearest: Quantized) -> Quantized:
        found, limits = super().averaged(place, x, nearest), self.limits(place.name)
        if found is nearest or limits is None:
            return found
        return dataclasses.replace(found, codes=jnp.clip(found.codes, *limits))


def _bit_length(magnitude: jax.Array) -> jax.Array:
    """The bit length of whole float32 numbers from 0 to 2^24, exact, in float32."""
    return jnp.frexp(magnitude)[1].astype(jnp.float32)


def _refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer cannot drop bits; None if it can."""
    if quantizer.stack:
        return "it is in a scan"
    if quantizer.follows_tensor:
        return f'its scale follows the tensor at every step (method "{quantizer.estimator.name}")'
    if "zero_point" in quantizer.learned:
        return f'its zero point is learned (method "{quantizer.estimator.name}")'
    if not quantizer.spec.symmetric:
        return "its codes have a zero point; QSpec(symmetric=True) has none"
    if quantizer.fixed is not None:
        return "its scale is fixed by the range of a function"
    return None


def _shape(shape: tuple[int, ...], axes: tuple[int, ...], per: Per) -> tuple[int, ...]:
    """The shape of k, with as many axes as the weight."""
    if per == "weight":
        return shape
    return tuple(size if per == "channel" and axis in axes else 1 for axis, size in enumerate(shape))
