"""What a runtime computes, by name."""

from qjax.targets import generic
from qjax.targets.base import Target, Weighted, get, names, register

__all__ = ["Target", "Weighted", "generic", "get", "names", "register"]
