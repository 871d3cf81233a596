"""Gives a call's arguments to the parameters of a function, also to those that take keywords only."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_keywords(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, of which those behind the positional parameters get the names of keyword-only ones.

    A batch is a tuple, so it has no names. What is left of it goes to the keyword-only parameters that have no default
    and no value in `kwargs`, in their order; what is left then stays positional.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A callable without a known signature.
        return tuple(args), dict(kwargs)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(args), dict(kwargs)
    positional = sum(p.kind in _POSITIONAL for p in parameters)
    free = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in kwargs]
    if len(args) - positional > len(free):
        return tuple(args), dict(kwargs)
    return tuple(args[:positional]), {**kwargs, **dict(zip(free, args[positional:], strict=False))}
