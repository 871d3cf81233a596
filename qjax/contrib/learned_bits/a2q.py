"""Keeps weights so small during training that no input can overflow a narrow accumulator (A2Q and A2Q+).

A sum of products of N-bit activations with the codes q of one output channel stays within a signed register of P bits
if the L1 norm of q is small enough:

- A2Q (Colbert, Pappalardo, Petri-Koenig, ICCV 2023, arXiv 2308.13504): `|q|_1 <= (2^(P-1) - 1) / 2^(N - signed)`.
- A2Q+ (Colbert et al., ICML 2024, arXiv 2401.10432): `|q|_1 <= (2^P - 2) / (2^N - 1)` where the positive and the
  negative codes have half of the norm each. With activations in [l, h], l <= 0 <= h, h - l <= 2^N - 1 and both sums at
  most B, the accumulator is at most B h - B l <= B (2^N - 1), wherever the zero point is. For activations that are
  never negative this is twice A2Q's norm.

The papers write the weight as `g v / |v|_1` with a learned g that is clipped to the bound (and A2Q+ centres v, so that
the two halves are equal before rounding), and round codes towards zero, which never increases a norm. Here the weight
stays the user's parameter and is *projected* after each update of the optimizer. Codes are rounded to nearest, as
everywhere in qjax, which may increase a norm; the bound therefore applies to the norm of the codes themselves. For A2Q+
the codes of each sign are bounded by half of the norm, and nothing is centred.

The projection reduces all magnitudes of a channel by one common number and stops at zero. This is the Euclidean
projection onto an L1 ball (Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008), namely the largest ball whose codes
satisfy the bound. A2Q+ uses the same projection once, for its first weights.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from qjax import ops
from qjax.calibration.learned import Quantizer, with_scales
from qjax.layers import write_state
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.numerics.qspec import QSpec, split_groups
from qjax.ops.facts import ProductFacts
from qjax.support.batches import arguments_of
from qjax.tracing import Annotation
from qjax.tracing.annotation import LayerUse

_HALVINGS = 26
"""How often the interval that contains the threshold is halved; float32 has 24 bits."""


def accumulator_bound(bits: int, activations: QSpec, plus: bool = False) -> int:
    """The greatest L1 norm of one output channel's codes with which no input overflows a signed register.

    Args:
      bits: P, the width of the register including the sign, 2 to 32.
      activations: the spec of the activations that the codes are multiplied with. A2Q's "signed" saves a bit only where
        the zero point is 0: asymmetric codes minus their zero point may reach 2^N - 1 on either side.
      plus: A2Q+'s bound, for channels whose positive and negative codes have at most half of it each; always even.

    Raises:
      ValueError: `bits` is outside of 2..32.

    Examples:
      >>> import qjax
      >>> qjax.training.accumulator_bound(16, qjax.QSpec(bits=8))
      255
    """
    if not 2 <= bits <= 32:
        raise ValueError(f"accumulator_bound: expected a register of 2 to 32 bits, got {bits}.")
    if plus:
        return 2 * ((2 ** (bits - 1) - 1) // (activations.levels - 1))
    return (2 ** (bits - 1) - 1) // 2 ** (activations.bits - (activations.signed and activations.symmetric))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AccumulatorConstraint:
    """The result of `constrain_accumulators`. It is a pytree, so that one compiled step serves every width.

    Attributes:
      axes: per weight, by its quantizer's name, the axes that the accumulator does not sum over.
      plus: A2Q+ or A2Q.
      bounds: per weight, the greatest L1 norm of a channel's codes; with `plus` half of it for each sign.

    Examples:
      ```python
      constraint = qjax.training.constrain_accumulators(qmodel, x, 16)
      constraint.initialize(qmodel)  # before training
      constraint.project(qmodel)  # after each step
      ```
    """

    axes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})
    plus: bool = dataclasses.field(metadata={"static": True})
    bounds: dict[str, Any]

    def project(self, qmodel: QuantizedModel) -> None:
        """Project the weights of every channel that breaks its bound, under the present scales; works inside jit.

        Call it after each update of the optimizer, and after anything else that changes a weight or its scale.
        Afterwards the codes, and those of the converted graph, satisfy the bound exactly. Channels that satisfy it
        already are unchanged, bit for bit.
        """
        state, params = nnx.state(qmodel.model), qmodel.quantizer_values()
        projected: dict[tuple[str, ...], jax.Array] = {}
        for name, axes in self.axes:
            limit, quantizer = self._limit(name), qmodel.plan.by_name[name]
            projected[tuple(name.split("/"))] = _project(
                _weight(state, name), params[name], limit, quantizer, axes, self.plus
            )
        write_state(qmodel.model, projected)

    def initialize(self, qmodel: QuantizedModel) -> None:
        """Choose new scales for the weights that break their bound, and project: once, before training, outside jit.

        Calibrated scales spread a weight over all codes, so a small norm would be spent on the few greatest weights.
        Here each scale is multiplied by a power of 2^(1/8), from 1 until one code is left. The power is chosen such
        that the projected codes reproduce the float weight with the least squared error. (A2Q+ keeps the scale and
        projects. Its scales then learn through the norm that contains them, which those of a projected weight do not.)
        """
        params = qmodel.quantizer_values()
        for name, axes in self.axes:
            quantizer, w = qmodel.plan.by_name[name], _weight(nnx.state(qmodel.model), name)
            if bool(jnp.all(_norms(quantizer(params[name], w).codes, axes, self.plus) <= self._limit(name))):
                continue
            limit, first = self._limit(name), quantizer.qparams(params[name], w)
            best, least = np.asarray(first.scale), np.full(np.shape(first.scale), np.inf)
            for step in range(8 * quantizer.spec.bits + 1):
                scale = np.asarray(first.scale) * np.float32(2 ** (step / 8))
                values = quantizer.init(first.replace(scale=jnp.asarray(scale)))
                ready = with_scales({name: quantizer}, {name: values})[name]
                error = np.asarray(_error(w, ready, limit, quantizer, axes, self.plus))
                best, least = np.where(error < least, scale, best), np.minimum(error, least)
            qmodel.quantizers.write({name: quantizer.init(first.replace(scale=jnp.asarray(best)))})
        self.project(qmodel)

    def norms(self, qmodel: QuantizedModel) -> dict[str, jax.Array]:
        """Per weight, int32 [2, channels...]: the bounded L1 norms of the present codes.

        With `plus`, of the positive and of the negative codes, to be compared with half of the bound; otherwise of all
        codes, twice.
        """
        state, params = nnx.state(qmodel.model), qmodel.quantizer_values()
        codes = {name: qmodel.plan.by_name[name](params[name], _weight(state, name)).codes for name, _ in self.axes}
        return {name: _norms(codes[name], axes, self.plus) for name, axes in self.axes}

    def penalty(self, qmodel: QuantizedModel) -> jax.Array:
        """float32 scalar: the sum over channels of `max(log2 |w / s|_1 - log2 bound, 0)`; differentiable.

        This is A2Q's regulariser (its equation for L_reg, in terms of t and T), where the norm of the float weight in
        steps of its scale replaces the learned t. It pulls weights down and scales up before the projection has to.
        With `plus` it is the sum over both signs, each against half of the bound. The papers weigh it with 1e-3.
        """
        state, params, total = nnx.state(qmodel.model), qmodel.quantizer_values(), jnp.zeros((), jnp.float32)
        for name, axes in self.axes:
            w, quantizer = _weight(state, name).astype(jnp.float32), qmodel.plan.by_name[name]
            scale = quantizer.qparams(params[name], w).scale
            kept = quantizer.spec.param_axes(w.ndim)
            steps = w / jnp.reshape(scale, [size if axis in kept else 1 for axis, size in enumerate(w.shape)])
            parts = _signs(steps, axes) if self.plus else _signs(steps, axes).sum(0)
            limit = self._limit(name).astype(jnp.float32)
            # The inner maximum keeps the logarithm of an empty channel, and its gradient, finite.
            total = total + jnp.sum(jnp.log2(jnp.maximum(parts, limit)) - jnp.log2(limit))
        return total

    def _limit(self, name: str) -> jax.Array:
        """int32 scalar: the bound that `_norms` of this weight must not exceed."""
        bound = jnp.asarray(self.bounds[name], jnp.int32)
        return bound // np.int32(2) if self.plus else bound


def constrain_accumulators(
    qmodel: QuantizedModel, sample: Any, bits: int, *, plus: bool = False, only: str = ".*"
) -> AccumulatorConstraint:
    """Find every sum of products with a weight, and bound the weight's codes for a register of `bits`.

        constraint = qjax.training.constrain_accumulators(qmodel, sample, 16, plus=True)
        constraint.initialize(qmodel)

        @nnx.jit
        def step(qmodel, optimizer, x, labels):
            optimizer.update(qmodel, nnx.grad(loss)(qmodel, x, labels))
            constraint.project(qmodel)

    Then `qjax.accumulators(qjax.convert(qmodel, sample)).bits <= bits`. The bound covers the sum of products, which is
    what narrow registers hold; the bias is added afterwards in int32. Products of two activations have no weight and no
    bound. The constraint works with every method of learning scales except "dynamic".

    Args:
      qmodel: the quantized model.
      sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.
      bits: width of the register, including the sign.
      plus: A2Q+ instead of A2Q.
      only: a regular expression that must match a weight's name in full; other weights are not constrained.

    Raises:
      ValueError: no weight matches; no code but 0 fits; or a weight cannot be projected, because its scale follows it
        ("dynamic"), it has groups of scales, it is in a scan, or the model transforms it before it is used.
    """
    check_quantized(qmodel, "constrain_accumulators", numbers=False)
    args = arguments_of(sample, "constrain_accumulators", traced=True)
    call = qmodel.trace(*args)
    traced, annotation = call.traced, call.annotation
    parameters = dict(zip(traced.program.inputs, traced.names, strict=True))
    direct = {p.name for (eqn, index), p in annotation.weights.items() if parameters.get(eqn.inputs[index]) == p.name}
    axes: dict[str, tuple[int, ...]] = {}
    bounds: dict[str, Any] = {}
    for use in _sums(annotation):
        name = use.weight.name
        if not re.fullmatch(only, name):
            continue
        _check(qmodel, use, name in direct)
        assert use.input is not None
        spec = qmodel.plan.by_name[use.input.name].spec
        bound = accumulator_bound(bits, spec, plus)
        if bound < 1:
            raise ValueError(
                f"constrain_accumulators: {name!r}: expected a register that holds one product, got {bits} bits for "
                f"activations of {spec.bits}. Use more bits for it, or fewer for {use.input.name!r}."
            )
        axes[name] = use.weight.axes
        # A weight that is used twice must fit the narrower accumulator.
        bounds[name] = min(bound, bounds.get(name, bound))
    if not axes:
        names = ", ".join(use.weight.name for use in _sums(annotation)) or "none"
        raise ValueError(f"constrain_accumulators: {only!r} matches no weight of a sum. Weights: {names}.")
    return AccumulatorConstraint(tuple(axes.items()), plus, bounds)


def _sums(annotation: Annotation) -> list[LayerUse]:
    return [
        use for use in annotation.layers if isinstance(ops.get(use.weight.op), ProductFacts) and use.input is not None
    ]


def _check(qmodel: QuantizedModel, use: LayerUse, direct: bool) -> None:
    place, quantizer = use.weight, qmodel.plan.by_name[use.weight.name]
    terms = math.prod(size for axis, size in enumerate(place.shape) if axis not in place.axes)
    reason = None
    if quantizer.follows_tensor:
        reason = (
            'its scale follows it (method "dynamic"), so smaller weights have the same codes. Learn or fix the scale'
        )
    elif quantizer.spec.group_size is not None:
        reason = "it has groups of scales, whose sums have registers of their own. Use one scale per channel"
    elif place.stack:
        reason = "it is stacked for a scan. Leave it out with `only`, or write the layers out"
    elif not direct:
        reason = "the model transforms it before it is used. Store the parameter as it is used"
    elif terms * quantizer.spec.levels >= 2**31:
        reason = f"the norm of {terms:,} codes may leave int32. Use fewer bits for it"
    if reason is not None:
        raise ValueError(f"constrain_accumulators: {place.name!r} ({place.location}) cannot be projected: {reason}.")


def _weight(state: Any, name: str) -> jax.Array:
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    return flat[name][...]


def _norms(codes: jax.Array, axes: tuple[int, ...], plus: bool) -> jax.Array:
    """int32 [2, ...]: the bounded norms of positive and of negative weights; without `plus` both are the whole norm."""
    signs = _signs(codes.astype(jnp.int32), axes)
    return signs if plus else jnp.broadcast_to(signs.sum(0, dtype=jnp.int32), signs.shape)


def _signs(values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """[2, ...]: the sums of positive values and of magnitudes of negative ones; reduced axes have size 1."""
    summed = tuple(axis for axis in range(values.ndim) if axis not in axes)
    zero = jnp.zeros((), values.dtype)
    parts = (jnp.maximum(values, zero), jnp.maximum(-values, zero))
    return jnp.stack([jnp.sum(part, summed, keepdims=True, dtype=values.dtype) for part in parts])


# Compiled outside of a trace too, so that there is one compilation per kind of weight instead of one per call.
@functools.partial(jax.jit, static_argnames=("quantizer", "axes", "plus"))
def _project(
    w: jax.Array, params: Any, limit: jax.Array, quantizer: Quantizer, axes: tuple[int, ...], plus: bool
) -> jax.Array:
    """w with the magnitudes of each channel (and sign) reduced by the least number with which its codes fit.

    Subtraction, scaling and rounding are monotone in floating point too, so bisection finds the threshold. It returns
    the end of the interval whose codes were tested.
    """
    zero = jnp.zeros((), w.dtype)

    def lower(threshold: jax.Array) -> jax.Array:
        return jnp.where(w > zero, jnp.maximum(w - threshold[0], zero), jnp.minimum(w + threshold[1], zero))

    def fits(part: jax.Array) -> jax.Array:
        return _norms(quantizer(params, part).codes, axes, plus) <= limit

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) * jnp.asarray(0.5, w.dtype)
        good = fits(lower(middle))
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    now = fits(w)
    top = jnp.broadcast_to(jnp.max(jnp.abs(w)), now.shape)
    _, high = lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(top), top))
    return lower(jnp.where(now, jnp.zeros_like(high), high))


@functools.partial(jax.jit, static_argnames=("quantizer", "axes", "plus"))
def _error(
    w: jax.Array, params: Any, limit: jax.Array, quantizer: Quantizer, axes: tuple[int, ...], plus: bool
) -> jax.Array:
    """float32, one per scale: the squared distance from w to its quantized projection."""
    quantized = quantizer(params, _project(w, params, limit, quantizer, axes, plus))
    view, reduced = split_groups(jnp.square(w.astype(jnp.float32) - quantized.real32()), quantizer.spec)
    return jnp.sum(view, reduced)
