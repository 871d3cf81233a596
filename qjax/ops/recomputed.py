"""Whether the backward recomputes the forward. If so, a product need not save memory on its residuals."""

import contextlib
import contextvars
from collections.abc import Generator

_RECOMPUTED = contextvars.ContextVar("recomputed", default=False)


@contextlib.contextmanager
def recomputed() -> Generator[None, None, None]:
    """While a function is traced whose backward computes it again (`jax.checkpoint`, a loop over time)."""
    token = _RECOMPUTED.set(True)
    try:
        yield
    finally:
        _RECOMPUTED.reset(token)


def is_recomputed() -> bool:
    """Within `recomputed`."""
    return _RECOMPUTED.get()
