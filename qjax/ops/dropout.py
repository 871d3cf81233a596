"""Dropout and noise, which act only in training, so graphs do not contain them.

Dropped codes become 0, and the scale is divided by the probability of keeping one. A tensor with noise is quantized
again with its own quantization parameters; gradients pass through the rounding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from qjax.numerics.affine import broadcast_to_tensor
from qjax.numerics.fake_quant import fake_quant_codes
from qjax.ops.base import Elementwise, Equation, Quantized, Role, real, register
from qjax.ops.facts import no_filling
from qjax.ops.fields import NoFields


@register
class Dropout(Elementwise):
    """Sets codes to zero and divides the scale by the probability of keeping one. In evaluation the layer vanishes."""

    name = "dropout"
    fields = NoFields
    role = Role.CHAIN
    primitives = ("dropout",)
    on_grid = True
    filling = no_filling
    clamps = False

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0]

    def has_integer_form(self, eqn: Equation) -> bool:
        return False

    def may_negate(self, attributes: Any) -> bool:
        return False

    def compose(self, attributes: Any, constants: Any, affine: Any) -> Any:
        raise ValueError("Dropout has no integer form. Convert in evaluation mode: call model.eval() first.")

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *rest = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(*(real(x) for x in inputs))
        if _is_noise(eqn):
            noisy, *state = eqn.bind(x.real(), *(real(value) for value in rest))
            return [dataclasses.replace(x, codes=_again(x, noisy)), *state]
        ones = jnp.ones(x.shape, eqn.out_dtypes[0])
        dropped, *state = eqn.bind(ones, *rest)
        codes = jnp.where(dropped != 0, x.codes, jnp.zeros_like(x.codes))
        # the codes stay integers; `Quantized` multiplies cotangents by the scale, so the gradient is scaled too
        return [dataclasses.replace(x, codes=codes, scale=x.scale * _factor(eqn)), *state]


def _is_noise(eqn: Equation) -> bool:
    layer = eqn.params.get("layer")
    return layer is not None and dict(layer.attributes).get("noise", False)


def _again(x: Quantized, noisy: Any) -> Any:
    """The codes of a noisy tensor on the grid of x, with `x.scale` because dropout may have enlarged it."""
    spec = x.qparams.spec
    zero_point = broadcast_to_tensor(x.qparams.zero_point, spec, x.shape)
    noisy = noisy.astype(jnp.float32)
    return fake_quant_codes(noisy, jnp.broadcast_to(x.scale, x.shape), zero_point, spec.qmin, spec.qmax)


def _factor(eqn: Equation) -> float:
    """The factor of the elements that remain: a layer knows its rate, and dropout found in a program its factor."""
    layer = eqn.params.get("layer")
    return eqn.params["factor"] if layer is None else 1.0 / (1.0 - dict(layer.attributes)["rate"])
