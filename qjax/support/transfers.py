"""Allows qjax's own transfers between host and devices in programs that run under `jax.transfer_guard`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def with_transfers(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function such that transfers are allowed in it, because it reads numbers on the host by design.

    A guard is meant for transfers that a program makes by mistake, for instance in a training loop. It applies again
    when the function has returned.
    """

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return inside
