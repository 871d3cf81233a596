"""Where flax modules meet the tracer."""

from qjax.layers.scope import instrument, module_types
from qjax.layers.trace import Traced, trace, write_state

__all__ = ["Traced", "instrument", "module_types", "trace", "write_state"]
