"""qjax: quantization-aware training in JAX whose integers are the ones that ship."""

from qjax import calibration, numerics, ops, targets
from qjax.calibrating import calibrate
from qjax.export.accumulator_report import accumulators
from qjax.export.compare import compare
from qjax.export.integer_graph import IntegerGraph, load, read
from qjax.export.lower import ConversionError
from qjax.model import convert, exact, quantize, verify
from qjax.numerics.affine import QParams, QSpec
from qjax.numerics.fake_quant import fake_quant
from qjax.qmodel import QuantizedModel, QuantParam, QuantStat
from qjax.recipe import FLOAT, Override, Recipe

__version__ = "0.1.0"

__all__ = [
    "FLOAT",
    "ConversionError",
    "IntegerGraph",
    "Override",
    "QParams",
    "QSpec",
    "QuantParam",
    "QuantStat",
    "QuantizedModel",
    "Recipe",
    "accumulators",
    "calibrate",
    "calibration",
    "compare",
    "convert",
    "exact",
    "fake_quant",
    "load",
    "numerics",
    "ops",
    "quantize",
    "read",
    "targets",
    "verify",
]
