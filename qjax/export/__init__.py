"""From the annotated program to a graph of integers, and out.

Public here is what a vendor needs: patterns and `match`, `Backend`, `describe`.
"""

from qjax.export.backend import Backend, Fusion, compose, register_backend
from qjax.export.matching import Match, match
from qjax.export.passes.partition import expand
from qjax.export.pattern import Pattern, any_of, constant, op, optional, tensor
from qjax.export.view import NodeView, describe

__all__ = [
    "Backend",
    "Fusion",
    "Match",
    "NodeView",
    "Pattern",
    "any_of",
    "compose",
    "constant",
    "describe",
    "expand",
    "match",
    "op",
    "optional",
    "register_backend",
    "tensor",
]
