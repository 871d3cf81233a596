"""What a runtime computes, by name."""

from qjax.targets.base import Target, get, names, register

__all__ = ["Target", "get", "names", "register"]
