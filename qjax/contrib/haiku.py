"""Turns Haiku's batch normalisation and moving averages into one marked operation each.

In evaluation they are an affine step, which the tracer reads without help. In training the sums over the batch would be
operations that evaluation does not have. `haiku.intercept_methods` intercepts every call, so the user's modules are not
changed.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from qjax.tracing import Layer, bind


@contextlib.contextmanager
def around_function() -> Iterator[None]:
    """Bind the markers while a Haiku function runs; does nothing unless Haiku is loaded."""
    hk = sys.modules.get("haiku")
    if hk is None:
        yield
        return

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if type(context.module) is hk.BatchNorm and context.method_name == "__call__":
            return _batch_norm(hk, context.module, call, *args, **kwargs)
        if type(context.module) is hk.ExponentialMovingAverage and context.method_name == "__call__":
            return _moving_average(hk, context.module, *args, **kwargs)
        return call(*args, **kwargs)

    with hk.intercept_methods(intercept):
        yield


def _batch_norm(
    hk: Any, module: Any, call: Any, inputs: jax.Array, is_training: bool, test_local_stats: bool = False, **kwargs: Any
) -> jax.Array:
    if not is_training or kwargs or module.axis is not None or module.cross_replica_axis is not None:
        return call(inputs, is_training, test_local_stats, **kwargs)
    channel = module.channel_index % inputs.ndim
    axes = tuple(axis for axis in range(inputs.ndim) if axis != channel)
    shape = [1 if axis in axes else inputs.shape[axis] for axis in range(inputs.ndim)]
    operands: dict[str, jax.Array] = {}
    if module.create_scale:
        operands["scale"] = hk.get_parameter("scale", shape, inputs.dtype, module.scale_init)
    if module.create_offset:
        operands["bias"] = hk.get_parameter("offset", shape, inputs.dtype, module.offset_init)

    def function(x: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        # The formula of haiku.BatchNorm, with the same order of operations.
        given = dict(zip(operands, rest, strict=True))
        mean = jnp.mean(x, axes, keepdims=True)
        var = jnp.mean(jnp.square(x), axes, keepdims=True) - jnp.square(mean)
        inv = given.get("scale", jnp.ones((), x.dtype)) * jax.lax.rsqrt(var + jnp.asarray(module.eps, var.dtype))
        return [(x - mean) * inv + given.get("bias", jnp.zeros((), x.dtype)), mean, var]

    attributes = {
        "epsilon": float(module.eps),
        "trailing": inputs.ndim - 1 - channel,
        "updated": ("mean", "var"),
        "use_running_average": False,
    }
    layer = Layer("batch_norm", ("x", *operands), tuple(sorted(attributes.items())), function)
    y, mean, var = bind(layer, inputs, *operands.values())
    module.mean_ema(mean)
    module.var_ema(var)
    return y


def _moving_average(hk: Any, module: Any, value: Any, update_stats: bool = True) -> jax.Array:
    """Mark the update as one operation without an integer form, because statistics of the batch are no activation."""
    value = jnp.asarray(value)
    counter = hk.get_state("counter", (), jnp.int32, init=hk.initializers.Constant(-module.warmup_length))
    hidden = hk.get_state("hidden", value.shape, value.dtype, init=jnp.zeros)

    def function(value: jax.Array, counter: jax.Array, hidden: jax.Array) -> list[jax.Array]:
        # The formula of haiku.ExponentialMovingAverage, with the same order of operations.
        counter = counter + 1
        decay = jnp.asarray(module.decay, value.dtype)
        if module.warmup_length > 0:
            decay = jax.lax.select(counter <= 0, jnp.zeros_like(decay), decay)
        one = jnp.ones((), value.dtype)
        hidden = hidden * decay + value * (one - decay)
        return [counter, hidden, hidden / (one - jnp.power(decay, counter)) if module.zero_debias else hidden]

    layer = Layer("moving_average", ("value", "counter", "hidden"), (), function)
    counter, hidden, average = bind(layer, value, counter, hidden)
    if update_stats:
        for name, new in (("counter", counter), ("hidden", hidden), ("average", average)):
            hk.set_state(name, new)
    return average
