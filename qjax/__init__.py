"""qjax: quantization-aware training in JAX whose integers are the ones that ship.

A public name is imported from its module when it is first asked for, so that `import qjax` itself loads nothing: the
command line prints its help without JAX.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import qjax.contrib  # noqa: F401  # its parts register, and nothing else is imported
from qjax.support.installed import conflict, own_folder
from qjax.support.version import __version__ as __version__

if TYPE_CHECKING:
    from qjax import calibration, numerics, ops, targets, training
    from qjax.analysis.accumulators import accumulators
    from qjax.analysis.search import Budget, search
    from qjax.analysis.sensitivity import sensitivity
    from qjax.analysis.statistics import statistics
    from qjax.api.calibrate import calibrate
    from qjax.api.exact import exact
    from qjax.api.explain import explain
    from qjax.api.workflow import convert, quantize, verify
    from qjax.comparison.compare import compare
    from qjax.contrib import profiles
    from qjax.contrib.float_models import from_onnx, from_tflite
    from qjax.contrib.importers import read
    from qjax.contrib.keras.fit import load_keras, to_keras
    from qjax.contrib.keras.module import from_keras
    from qjax.contrib.linen import from_linen
    from qjax.contrib.post_training.post_training import post_training
    from qjax.export.integer_graph import IntegerGraph, load
    from qjax.layers.function import from_function
    from qjax.layers.stateful import stateful
    from qjax.layers.trace import TraceError
    from qjax.lower import ConversionError
    from qjax.model.fingerprint import QuantPlan
    from qjax.model.quantized_model import QuantizedModel
    from qjax.model.quantizer_numbers import QuantParam, QuantStat
    from qjax.numerics.affine import QParams, QSpec
    from qjax.numerics.fake_quant import fake_quant
    from qjax.numerics.token_probabilities import log_probs, sample
    from qjax.recipe.recipe import FLOAT, Dynamic, Gradients, Override, Recipe, WeightFormat, integers
    from qjax.reporting.node_data import node_data
    from qjax.reporting.report import report
    from qjax.support.compilation_cache import cache_compilations
    from qjax.support.errors import Unsupported
    from qjax.support.progress import show_progress


__all__ = [
    "FLOAT",
    "Budget",
    "ConversionError",
    "Dynamic",
    "Gradients",
    "IntegerGraph",
    "Override",
    "QParams",
    "QSpec",
    "QuantParam",
    "QuantPlan",
    "QuantStat",
    "QuantizedModel",
    "Recipe",
    "TraceError",
    "Unsupported",
    "WeightFormat",
    "accumulators",
    "cache_compilations",
    "calibrate",
    "calibration",
    "compare",
    "convert",
    "exact",
    "explain",
    "fake_quant",
    "from_function",
    "from_keras",
    "from_linen",
    "from_onnx",
    "from_tflite",
    "integers",
    "load",
    "load_keras",
    "log_probs",
    "node_data",
    "numerics",
    "ops",
    "post_training",
    "profiles",
    "quantize",
    "read",
    "report",
    "sample",
    "search",
    "sensitivity",
    "show_progress",
    "stateful",
    "statistics",
    "targets",
    "to_keras",
    "training",
    "verify",
]

_HOMES = {
    "analysis.search": ("Budget", "search"),
    "analysis.sensitivity": ("sensitivity",),
    "analysis.statistics": ("statistics",),
    "api.calibrate": ("calibrate",),
    "support.compilation_cache": ("cache_compilations",),
    "analysis.accumulators": ("accumulators",),
    "comparison.compare": ("compare",),
    "export.integer_graph": ("IntegerGraph", "load"),
    "api.exact": ("exact",),
    "api.explain": ("explain",),
    "lower": ("ConversionError",),
    "model.fingerprint": ("QuantPlan",),
    "layers.trace": ("TraceError",),
    "layers.function": ("from_function",),
    "contrib.float_models": ("from_onnx", "from_tflite"),
    "contrib.keras.module": ("from_keras",),
    "contrib.linen": ("from_linen",),
    "layers.stateful": ("stateful",),
    "api.workflow": ("convert", "quantize", "verify"),
    "numerics.affine": ("QParams", "QSpec"),
    "numerics.fake_quant": ("fake_quant",),
    "numerics.token_probabilities": ("log_probs", "sample"),
    "support.errors": ("Unsupported",),
    "support.progress": ("show_progress",),
    "model.quantized_model": ("QuantizedModel",),
    "model.quantizer_numbers": ("QuantParam", "QuantStat"),
    "recipe.recipe": ("FLOAT", "Dynamic", "Gradients", "Override", "Recipe", "WeightFormat", "integers"),
    "reporting.node_data": ("node_data",),
    "reporting.report": ("report",),
    "contrib.importers": ("read",),
    "contrib.keras.fit": ("load_keras", "to_keras"),
    "contrib.post_training.post_training": ("post_training",),
}
"""Module -> the public names that live there; the other names of `__all__` are modules."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = {
    "analysis": "analysis",
    "calibration": "calibration",
    "export": "export",
    "gguf": "contrib.gguf",
    "lab": "contrib.lab",
    "layers": "layers",
    "numerics": "numerics",
    "ops": "ops",
    "profiles": "contrib.profiles",
    "reporting": "reporting",
    "targets": "targets",
    "tracing": "tracing",
    "training": "training",
}

_problem = conflict(own_folder())
if _problem is not None:
    warnings.warn(_problem, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"qjax.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"qjax.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'qjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
