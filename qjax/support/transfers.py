"""What qjax itself moves between the host and the devices, for programs that run under `jax.transfer_guard`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def with_transfers(function: Callable[P, R]) -> Callable[P, R]:
    """The function with transfers allowed: it is written to read numbers on the host and to write them back.

    A guard is for transfers that a program makes without meaning to, such as those in a training loop. It is as it was
    when the function has returned.
    """

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return inside
