"""Normalisations, each as one marked operation, as the layers of Flax are, so that quantizing and training know it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, is_known, operator
from qjax.tracing import Layer, bind


def _along(call: Call, vector: Any, axes: Sequence[int], rank: int) -> Any:
    """A scale or bias in a shape that broadcasts along these axes of an array of this rank."""
    sizes = iter(vector.shape)
    return jnp.reshape(vector, [next(sizes) if axis in axes else 1 for axis in range(rank)])


@operator("BatchNormalization", layout="last", weights=(1, 2, 3, 4))
def _batch_normalization(call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias, with the file's statistics or, in training, the batch's.

    In training the statistics move as `momentum` says: new = momentum * old + (1 - momentum) * of the batch.
    """
    epsilon, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    axis = x.ndim - 1 if call.last else min(1, x.ndim - 1)
    others = tuple(i for i in range(x.ndim) if i != axis)
    of_file = bool(call.get("training_mode", 0))
    training = call.training or of_file

    def function(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> list[Any]:
        new = []
        if training:
            batch = [jnp.mean(x, others), jnp.var(x, others)]
            new = [
                call.like(momentum, old) * old + call.like(1 - momentum, old) * one
                for old, one in zip((mean, variance), batch, strict=True)
            ]
            mean, variance = batch
        wide = [_along(call, v, (axis,), x.ndim) for v in (scale, bias, mean, variance)]
        y = (x - wide[2]) * (lax.rsqrt(wide[3] + call.like(epsilon, x)) * wide[0]) + wide[1]
        return [y, *new]

    operands = (x, scale, bias, mean, variance)
    if of_file or any(is_known(v) for v in operands):
        return tuple(function(*operands))
    attributes: dict[str, Any] = {
        "epsilon": float(epsilon),
        "trailing": x.ndim - 1 - axis,
        "use_running_average": not training,
        **({"updated": ("mean", "var")} if training else {}),
    }
    names = ("x", "scale", "bias", "mean", "var")
    y, *new = bind(Layer("batch_norm", names, tuple(sorted(attributes.items())), function), *operands)
    call.updates.update(zip(call.node.inputs[3:5], new, strict=False))
    return y


def normalize(
    call: Call,
    kind: str,
    x: Any,
    axes: Sequence[int],
    vectors: Sequence[Any],
    epsilon: float,
    *,
    features: Sequence[int] = (),
    groups: int = 1,
) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; of the kind "rms_norm" without the mean and the bias.

    Args:
      axes: over which the statistics are taken; with groups, the channels (the last axis) are among them.
      vectors: the scale and perhaps the bias, along `features`.
    """
    features = tuple(features)

    def function(x: Any, *vectors: Any) -> list[Any]:
        shape = x.shape
        y = jnp.reshape(x, (*shape[:-1], groups, shape[-1] // groups)) if groups > 1 else x
        over = (*(a for a in axes if a != x.ndim - 1), x.ndim) if groups > 1 else tuple(axes)
        if kind != "rms_norm":
            y = y - jnp.mean(y, over, keepdims=True)
        y = jnp.reshape(y * lax.rsqrt(jnp.mean(y * y, over, keepdims=True) + call.like(epsilon, y)), shape)
        for vector, join in zip(vectors, (jnp.multiply, jnp.add), strict=False):
            y = join(y, _along(call, vector, features, x.ndim))
        return [y]

    if any(is_known(v) for v in vectors) or is_known(x):
        return function(x, *vectors)[0]
    attributes = {
        "axes": tuple(axes),
        "center": kind != "rms_norm",
        "divisor": 0,
        "epsilon": float(epsilon),
        "feature_axes": features,
        "groups": groups,
        "joined": "add",
    }
    names = ("x", "scale", "bias")[: 1 + len(vectors)]
    (y,) = bind(Layer(kind, names, tuple(sorted(attributes.items())), function), x, *vectors)
    return y


@operator("InstanceNormalization", layout="last", weights=(1, 2))
def _instance_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    axes = tuple(range(1, x.ndim - 1))
    return normalize(call, "instance_norm", x, axes, (scale, bias), call.get("epsilon", 1e-5), features=(x.ndim - 1,))


@operator("GroupNormalization", layout="last", weights=(1, 2))
def _group_normalization(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    """Before the operator set 21 the scale and the bias have one number for each group."""
    groups = call.get("num_groups")
    if scale.shape[0] != x.shape[-1]:
        scale, bias = (jnp.repeat(v, x.shape[-1] // groups) for v in (scale, bias))
    return normalize(
        call,
        "group_norm",
        x,
        tuple(range(1, x.ndim)),
        (scale, bias),
        call.get("epsilon", 1e-5),
        features=(x.ndim - 1,),
        groups=groups,
    )


def _fits(vectors: Sequence[Any], x: Any, axis: int) -> bool:
    return all(tuple(v.shape) == tuple(x.shape[axis:]) for v in vectors)


@operator("LayerNormalization", weights=(1, 2))
def _layer_normalization(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = call.get("axis", -1) % x.ndim
    axes = tuple(range(axis, x.ndim))
    epsilon = call.get("epsilon", 1e-5)
    vectors = [v for v in (scale, bias) if v is not None]
    if _fits(vectors, x, axis):
        y = normalize(call, "layer_norm", x, axes, vectors, epsilon, features=axes)
    else:
        y = normalize(call, "layer_norm", x, axes, (), epsilon)
        y = y * call.ranked(x, scale)[1]
        y = y if bias is None else y + call.ranked(x, bias)[1]
    if not call.wants(1) and not call.wants(2):
        return y
    mean = jnp.mean(x, axes, keepdims=True)
    return y, mean, lax.rsqrt(jnp.var(x, axes, keepdims=True) + call.like(epsilon, x))


@operator("RMSNormalization", "SimplifiedLayerNormalization", weights=(1,))
def _rms_normalization(call: Call, x: Any, scale: Any) -> Any:
    axis = call.get("axis", -1) % x.ndim
    axes = tuple(range(axis, x.ndim))
    if _fits([scale], x, axis):
        return normalize(call, "rms_norm", x, axes, (scale,), call.get("epsilon", 1e-5), features=axes)
    return normalize(call, "rms_norm", x, axes, (), call.get("epsilon", 1e-5)) * call.ranked(x, scale)[1]


@operator("MeanVarianceNormalization")
def _mean_variance_normalization(call: Call, x: Any) -> Any:
    axes = tuple(call.get("axes", [0, 2, 3]))
    centered = x - jnp.mean(x, axes, keepdims=True)
    return centered / (jnp.sqrt(jnp.mean(centered * centered, axes, keepdims=True)) + call.like(1e-9, x))


@operator("LpNormalization", layout="axes")
def _lp_normalization(call: Call, x: Any) -> Any:
    axis = call.axis(call.get("axis", -1), x.ndim)
    if call.get("p", 2) == 1:
        length = jnp.sum(jnp.abs(x), axis, keepdims=True)
    else:
        length = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    return jnp.where(length == 0, jnp.zeros_like(x), x / jnp.where(length == 0, jnp.ones_like(length), length))


@operator("LRN", layout="last")
def _lrn(call: Call, x: Any) -> Any:
    """x / (bias + alpha / size * sum of squares of neighbouring channels) ** beta."""
    size, alpha, beta = call.get("size"), call.get("alpha", 1e-4), call.get("beta", 0.75)
    before = (size - 1) // 2
    window = (1,) * (x.ndim - 1) + (size,)
    pads = [(0, 0)] * (x.ndim - 1) + [(before, size - 1 - before)]
    total = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, pads)
    base = total * call.like(alpha / size, x) + call.like(call.get("bias", 1.0), x)
    return x * jnp.power(base, call.like(-beta, x))


# ---------------------------------------------------------------------- losses


def _loss(call: Call, scores: Any, labels: Any, weight: Any) -> Any:
    """The mean, sum or list of -weight[label] * scores[label]; axis 1 holds the classes."""
    ignored = call.get("ignore_index")
    there = jnp.ones(labels.shape, bool) if ignored is None else labels != jnp.asarray(ignored, labels.dtype)
    safe = jnp.where(there, labels, jnp.zeros_like(labels))
    chosen = jnp.squeeze(jnp.take_along_axis(scores, jnp.expand_dims(safe, 1), axis=1), 1)
    factor = jnp.ones_like(chosen) if weight is None else jnp.take(weight, safe, axis=0)
    factor = jnp.where(there, factor, jnp.zeros_like(factor))
    losses = -chosen * factor
    how = call.get("reduction", "mean")
    if how == "none":
        return losses
    return jnp.sum(losses) / jnp.sum(factor) if how == "mean" else jnp.sum(losses)


@operator("NegativeLogLikelihoodLoss")
def _negative_log_likelihood_loss(call: Call, x: Any, labels: Any, weight: Any = None) -> Any:
    return _loss(call, x, labels, weight)


@operator("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy_loss(call: Call, x: Any, labels: Any, weight: Any = None) -> Any:
    scores = jax.nn.log_softmax(x, 1)
    loss = _loss(call, scores, labels, weight)
    return (loss, scores) if call.wants(1) else loss
