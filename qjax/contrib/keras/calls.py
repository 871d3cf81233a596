"""Intercepts the calls of Keras layers while a model runs, as `flax.linen.intercept_methods` does for linen modules.

Keras has no such function, so methods of its public classes are replaced while a context is open, and restored after
it. The replacement does nothing in threads that have opened no context.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Handler = Callable[..., Any]
"""(layer, the method bound to it, *args, **kwargs) -> what the call returns."""


class _Active(threading.local):
    handlers: Mapping[tuple[type, str], Handler] | None = None


_active = _Active()
_lock = threading.Lock()
_replaced: dict[tuple[type, str], tuple[Any, int]] = {}
"""(class, method) -> the original method, and how many contexts are open."""


@contextlib.contextmanager
def intercepted(handlers: Mapping[tuple[type, str], Handler]) -> Iterator[None]:
    """Within the context, a call of one of these methods goes to its handler. Contexts nest; the innermost one wins."""
    for key in handlers:
        _open(key)
    outer, _active.handlers = _active.handlers, handlers
    try:
        yield
    finally:
        _active.handlers = outer
        for key in handlers:
            _close(key)


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Within the context, layers are called without interception."""
    outer, _active.handlers = _active.handlers, None
    try:
        yield
    finally:
        _active.handlers = outer


def _open(key: tuple[type, str]) -> None:
    cls, name = key
    with _lock:
        original, count = _replaced.get(key, (vars(cls)[name], 0))
        _replaced[key] = original, count + 1
        if count == 0:
            setattr(cls, name, _dispatching(key, original))


def _close(key: tuple[type, str]) -> None:
    cls, name = key
    with _lock:
        original, count = _replaced.pop(key)
        if count > 1:
            _replaced[key] = original, count - 1
        else:
            setattr(cls, name, original)


def _dispatching(key: tuple[type, str], original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = (_active.handlers or {}).get(key)
        if handler is None:
            return original(self, *args, **kwargs)
        return handler(self, functools.partial(original, self), *args, **kwargs)

    return call
