"""Reads a model once for everybody: the traced program, its quantizers' places, and its evaluation."""

from qjax.tracing.annotate import Annotation, Place, annotate
from qjax.tracing.evaluate import Evaluation, Params, Taps
from qjax.tracing.marker import Layer, bind
from qjax.tracing.program import ATOMIC, SCOPE, Equation, Program, Value, from_jaxpr

__all__ = [
    "ATOMIC",
    "SCOPE",
    "Annotation",
    "Equation",
    "Evaluation",
    "Layer",
    "Params",
    "Place",
    "Program",
    "Taps",
    "Value",
    "annotate",
    "bind",
    "from_jaxpr",
]
