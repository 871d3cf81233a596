"""qjax: quantization-aware training in JAX whose integers are the ones that ship."""

from qjax import calibration, numerics, ops, targets
from qjax.model import QuantizedModel, QuantParam, QuantStat, calibrate, quantize
from qjax.numerics.affine import QParams, QSpec
from qjax.numerics.fake_quant import fake_quant
from qjax.recipe import FLOAT, Override, Recipe

__version__ = "0.1.0"

__all__ = [
    "FLOAT",
    "Override",
    "QParams",
    "QSpec",
    "QuantParam",
    "QuantStat",
    "QuantizedModel",
    "Recipe",
    "calibrate",
    "calibration",
    "fake_quant",
    "numerics",
    "ops",
    "quantize",
    "targets",
]
