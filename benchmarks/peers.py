"""Quantization-aware training of the same models by other libraries, as far as they can: int8 weights per channel.

They are installed by `make bench` (`requirements/peers.lock`), and left out where they are missing.

- qwix 0.1.8, `QtProvider`: ranges found anew in every step (moving averages, `act_static_scale`, raise a
  TraceContextError where a convolution is differentiated).
- qwix 0.1.8, `OdmlQatProvider`: the one that mirrors a converter; every operation's tensors are quantized.
- aqtp 0.9.0: its dot_general in every `nnx.Linear`, with ranges found anew in every step. Convolutions stay in
  float32: their kernels get no gradient from it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx


def qwix_qt(model: Any, sample: Any, operations: Sequence[str] = ()) -> Any:
    """By qwix's `QtProvider`; operations: the names of those that are quantized, or () for all."""
    qwix: Any = importlib.import_module("qwix")
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", op_names=tuple(operations))
    return qwix.quantize_model(model, qwix.QtProvider([rule]), sample)


def _qwix_odml(model: Any, sample: Any) -> Any:
    qwix: Any = importlib.import_module("qwix")
    rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    return qwix.quantize_model(model, qwix.OdmlQatProvider([rule]), sample)


def _aqt(model: Any, sample: Any) -> Any:
    config: Any = importlib.import_module("aqt.jax.v2.config")
    configured: Any = config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)

    def multiply(lhs: Any, rhs: Any, numbers: Any, precision: Any = None, **_: Any) -> Any:
        return configured(lhs, rhs, numbers, precision)

    found = 0
    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Linear):
            module.dot_general = multiply
            found += 1
    if not found:
        raise ValueError("no nnx.Linear")
    return model


PEERS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "qwix": ("qwix", qwix_qt),
    "qwix, ODML": ("qwix", _qwix_odml),
    "aqtp": ("aqt", _aqt),
}
"""Name -> module, and what quantizes a copy of a model."""


def installed() -> dict[str, Callable[[Any, Any], Any]]:
    """Those that are here."""
    return {name: make for name, (module, make) in PEERS.items() if importlib.util.find_spec(module) is not None}
