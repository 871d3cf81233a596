"""Whether a backward computes its forward again, so that what a product keeps for its own does not matter."""

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
