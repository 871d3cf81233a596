"""Tells whether the backward recomputes the forward, so that a product need not save memory on its residuals."""

import contextlib
import contextvars
from collections.abc import Generator

_RECOMPUTED = contextvars.ContextVar("recomputed", default=False)


@contextlib.contextmanager
def recomputed() -> Generator[None, None, None]:
    """A context for tracing a function whose backward recomputes it (`jax.checkpoint`, a loop over time)."""
    token = _RECOMPUTED.set(True)
    try:
        yield
    finally:
        _RECOMPUTED.reset(token)


def is_recomputed() -> bool:
    """Whether the current trace is inside `recomputed`."""
    return _RECOMPUTED.get()
