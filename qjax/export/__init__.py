"""What `convert` returns, and the files in which it is stored: artifacts, emitters and readers.

This package also exports what a vendor needs: patterns and `match`, `Backend`, `describe`.
"""

from qjax.assign.backend import Backend, Fusion, compose, register_backend
from qjax.assign.partition import expand
from qjax.graph.matching import Match, match
from qjax.graph.node_view import NodeView, describe
from qjax.graph.pattern import Pattern, any_of, constant, op, optional, tensor

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
