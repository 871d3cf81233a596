"""Traces a model once, decides which tensors are quantized, and evaluates it in float or with fake quantization."""

from qjax.tracing.annotate import Annotation, Place, annotate
from qjax.tracing.coarse_tables import Lost, lost_tables, said
from qjax.tracing.evaluate import Evaluation, Params, Quantizer, Recorder, Taps
from qjax.tracing.integer_tables import Integers, integer_roots, observed, whole_of, with_integers
from qjax.tracing.joined import with_own_quantizers
from qjax.tracing.marker import Layer, bind
from qjax.tracing.program import ATOMIC, NAMED, SCOPE, Composite, Equation, Program, Value, from_jaxpr, user_line
from qjax.tracing.rewrites import rewrite
from qjax.tracing.rewrites.adapters import Adapter, adapter_of, joined, with_adapters_within
from qjax.tracing.rewrites.dynamic import (
    dynamic_products,
    makes_codes,
    product_of,
    setting_of_product,
    use_of,
    weight_of,
    with_dynamic,
)
from qjax.tracing.rewrites.float_mask_inputs import flag_roots
from qjax.tracing.rewrites.frozen import (
    lookup_of,
    made_of,
    move_of,
    sunk,
    uses_of_parameter,
    with_lookups,
    without_unread,
)
from qjax.tracing.rewrites.int32_wraparound import keeps_number
from qjax.tracing.rewrites.unread import needed

__all__ = [
    "ATOMIC",
    "NAMED",
    "SCOPE",
    "Adapter",
    "Annotation",
    "Composite",
    "Equation",
    "Evaluation",
    "Integers",
    "Layer",
    "Lost",
    "Params",
    "Place",
    "Program",
    "Quantizer",
    "Recorder",
    "Taps",
    "Value",
    "adapter_of",
    "annotate",
    "bind",
    "dynamic_products",
    "flag_roots",
    "from_jaxpr",
    "integer_roots",
    "joined",
    "keeps_number",
    "lookup_of",
    "lost_tables",
    "made_of",
    "makes_codes",
    "move_of",
    "needed",
    "observed",
    "product_of",
    "rewrite",
    "said",
    "setting_of_product",
    "sunk",
    "use_of",
    "user_line",
    "uses_of_parameter",
    "weight_of",
    "whole_of",
    "with_adapters_within",
    "with_dynamic",
    "with_integers",
    "with_lookups",
    "with_own_quantizers",
    "without_unread",
]
