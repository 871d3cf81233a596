"""Narrows the quantizers of a model to the bits that its codes need: the result of `LearnedBits.finish`.

A tensor that drops its k lowest bits gets a step that is 2^k times as large, and k bits less. A weight also loses the
highest bits that none of its codes uses.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.calibration.learned import Quantizer
from qjax.contrib.post_training.widths import replace_quantizers
from qjax.model.quantized_model import QuantizedModel
from qjax.numerics.affine import QParams
from qjax.ops import Quantized
from qjax.training.weights import set_codes


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
    for name, quantized in weights.items():
        codes[name] = np.asarray(quantized.codes).astype(np.int64)
        greatest = int(np.abs(codes[name]).max(initial=0))
        bits = max(2, 1 + greatest.bit_length())
        changed[name] = _narrow(qmodel.plan.by_name[name], np.asarray(quantized.qparams.scale), bits)
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
