"""A forward pass that rounds stochastically: up with a probability equal to the fraction, so unbiased in the mean.

It uses the rounding of Gupta et al. 2015 (arXiv 1502.02551, section 3.1) instead of fake quantization's rounding to
nearest, and changes nothing else: the model's own call, `convert`, `exact` and `verify` still round to nearest. Only
this function draws random numbers, from the key that is passed to it.
"""

import zlib
from typing import Any

import jax

from qjax.model.quantized_model import QuantizedModel
from qjax.ops import Quantized
from qjax.tracing import Place

_KEY = "rounding key"


def stochastic_forward(
    qmodel: QuantizedModel,
    key: jax.Array,
    *args: Any,
    weights: bool = True,
    activations: bool = True,
    **kwargs: Any,
) -> Any:
    """Return the output of `qmodel(*args, **kwargs)` with stochastically rounded codes.

    Gradients are those of the model's own call, with the drawn codes instead of the nearest ones. Batch-norm statistics
    are updated in training mode, as in the model's own call. It can be jitted and differentiated. In a training loop
    every step needs its own key, because otherwise all steps would round by the same draws:

        def loss(qmodel, key):
            return criterion(qjax.training.stochastic_forward(qmodel, key, x), y)

        grads = nnx.grad(loss)(qmodel, jax.random.fold_in(key, step))

    Every tensor draws from its own stream. The layers of a scan draw independently of each other, the steps of a
    recurrent loop (and the layers of a scan under `Recipe(scan="shared")`) draw alike. What is rounded at the
    accumulator's width, above all the bias, is still rounded to nearest.

    Args:
      qmodel: the model, in the mode in which it should run.
      key: a random key; the same key produces the same bits.
      weights: whether weights are rounded stochastically; otherwise to nearest.
      activations: likewise for the inputs and the activations. The inputs are then quantized by x * (1 / scale),
        whichever formula the target has for them.

    Raises:
      ValueError: neither weights nor activations are rounded stochastically, so the key would have no effect.

    Examples:
      ```python
      scores = qjax.training.stochastic_forward(qmodel, jax.random.key(0), x)
      ```
    """
    if not (weights or activations):
        raise ValueError(
            "stochastic_forward: expected weights, activations or both to be rounded stochastically, got neither; call "
            "the model itself to round to nearest."
        )
    plan = qmodel.plan
    call = qmodel.trace(*args, **kwargs)
    params = qmodel.quantizer_values()
    for name, quantizer in plan.quantizers:
        own = jax.random.fold_in(key, _number(name))
        # A scan passes each layer its slice of the parameters. The key is one of them, so each layer gets its own.
        stack = () if name in plan.shared else quantizer.stack
        params[name] = {**params[name], _KEY: jax.random.split(own, stack) if stack else own}

    def quantize(place: Place, own: dict[str, Any], x: jax.Array) -> Quantized:
        numbers = {name: value for name, value in own.items() if name != _KEY}
        if not (weights if place.kind == "weight" else activations):
            return call.quantize(place, numbers, x)
        draws = own[_KEY]
        if place.kind != "weight":
            # Tensors that share a quantizer draw separately, but a weight that is read twice must have the same codes
            # both times.
            draws = jax.random.fold_in(draws, _number(place.label))
        return plan.by_name[place.name](numbers, x, key=draws)

    evaluated = call.evaluate(quantize=quantize, params=params, averages=not activations)
    call.write(evaluated)
    return evaluated.output


def _number(name: str) -> int:
    """A 32-bit hash of a name that is the same in every process."""
    return zlib.crc32(name.encode())
