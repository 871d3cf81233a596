"""Passes the arguments of a batch to a function, also to its keyword-only parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_keywords(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split the arguments: those behind the positional parameters get the names of keyword-only ones.

    A batch is a tuple, so its values have no names. Those left over go, in order, to the keyword-only parameters that
    have neither a default nor a value in `kwargs`; any values still left stay positional.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a callable without a known signature
        return tuple(args), dict(kwargs)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(args), dict(kwargs)
    positional = sum(p.kind in _POSITIONAL for p in parameters)
    free = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in kwargs]
    if len(args) - positional > len(free):
        return tuple(args), dict(kwargs)
    return tuple(args[:positional]), {**kwargs, **dict(zip(free, args[positional:], strict=False))}
