"""Brings Flax modules, and models of other libraries, into the form that the tracer reads."""

from qjax.layers.any_batch import check_any_batch, check_nothing_drawn, describe_batch_of_one
from qjax.layers.scope import instrument, module_types
from qjax.layers.static_key import Definition
from qjax.layers.trace import Traced, TraceError, positional, trace, write_state

__all__ = [
    "Definition",
    "TraceError",
    "Traced",
    "check_any_batch",
    "check_nothing_drawn",
    "describe_batch_of_one",
    "instrument",
    "module_types",
    "positional",
    "trace",
    "write_state",
]
