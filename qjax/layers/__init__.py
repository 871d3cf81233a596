"""Where flax modules meet the tracer."""

from qjax.layers.scope import FLOAT_LAYERS, instrument, module_types
from qjax.layers.trace import Traced, trace, write_state

__all__ = ["FLOAT_LAYERS", "Traced", "instrument", "module_types", "trace", "write_state"]
