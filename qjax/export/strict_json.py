"""JSON without surprises: no NaN, no duplicate keys, bounded size, depth and numbers.

A file may come from anybody, and a checksum only proves that it arrived as it was sent. Every value is therefore
checked for its type and its bounds before use, and the functions below name the location of what they refuse.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from qjax.support.names import MAX_NAME

MAX_VALUES = 4_000_000
MAX_DEPTH = 24
MAX_KEY = MAX_NAME + 16  # "zero_point:" and a name
INT64 = (-(2**63), 2**63 - 1)


class ArtifactError(ValueError):
    """A file, or a graph to be written to one, that breaks the format; the message tells what was expected."""


def dumps(value: Any, where: str) -> str:
    """Compact JSON, with keys in the given order. Raises ArtifactError for what JSON cannot represent exactly."""
    return json.dumps(plain(value, where), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def loads(text: str, where: str) -> Any:
    """Parse strictly. Memory is bounded before the parser starts, because it makes at most MAX_VALUES values."""
    values = text.count(",") + text.count("[") + text.count("{") + 1
    if values > MAX_VALUES:
        raise ArtifactError(f"{where}: expected at most {MAX_VALUES} JSON values, got about {values}.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from None
    except RecursionError:
        raise ArtifactError(f"{where}: expected JSON at most {MAX_DEPTH} levels deep, got more.") from None
    except ValueError as error:
        raise ArtifactError(f"{where}: expected JSON, got text that does not parse: {error}.") from None
    return plain(value, where)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of None, bool, int, float, str, list and dict; tuples become lists, keys keep their order.

    Raises ArtifactError for any other type (numpy scalars too), a float that is not finite, an int beyond 64
    bits, a key that is not a name, text that is not Unicode, and more than MAX_DEPTH levels.
    """
    if depth > MAX_DEPTH:
        raise ArtifactError(f"{where}: expected JSON at most {MAX_DEPTH} levels deep, got more.")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return integer(value, *INT64, where)
    if kind is float:
        if not math.isfinite(value):
            raise ArtifactError(f"{where}: expected a finite number, got {value}.")
        return value
    if kind is str:
        return _unicode(value, where)
    if kind is list or kind is tuple:
        items = cast("list[Any]", value)
        return [plain(item, where, depth + 1) for item in items]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value)
        return {name(key, f"{where}: a key", MAX_KEY): plain(item, where, depth + 1) for key, item in pairs.items()}
    raise ArtifactError(
        f"{where}: expected None, bool, int, float, str, a list or a mapping of these, got {kind.__name__}; "
        "convert it with int(), float(), str() or .tolist()."
    )


def fields(value: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    """A mapping with exactly these keys."""
    result = mapping(value, where)
    if set(result) != set(keys):
        got = ", ".join(sorted(result)[:20])[:200]
        raise ArtifactError(f"{where}: expected the fields {', '.join(keys)}; got {got or 'none'}.")
    return result


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A JSON object."""
    if type(value) is not dict:
        raise ArtifactError(f"{where}: expected an object, got {_kind(value)}.")
    return cast("dict[str, Any]", value)


def sequence(value: Any, where: str) -> list[Any]:
    """A JSON array."""
    if type(value) is not list:
        raise ArtifactError(f"{where}: expected a list, got {_kind(value)}.")
    return cast("list[Any]", value)


def names(value: Any, where: str) -> tuple[str, ...]:
    """A JSON array of names."""
    return tuple(name(item, where) for item in sequence(value, where))


def name(value: Any, where: str, limit: int = MAX_NAME) -> str:
    """Unicode text of 1 to `limit` characters."""
    if type(value) is not str or not 1 <= len(value) <= limit:
        got = f"{len(value)} characters" if type(value) is str else _kind(value)
        raise ArtifactError(f"{where}: expected a string of 1 to {limit} characters, got {got}.")
    return _unicode(value, where)


def integer(value: Any, low: int, high: int, where: str) -> int:
    """An int (not a bool) within [low, high]."""
    if type(value) is not int:
        raise ArtifactError(f"{where}: expected an integer, got {_kind(value)}.")
    if not low <= value <= high:
        got = str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
        raise ArtifactError(f"{where}: expected an integer within [{low}, {high}], got {got}.")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {type(cast('object', value)).__name__}"
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArtifactError(f"{where}: expected Unicode, got a lone surrogate in {text[:40]!r}.") from None
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ArtifactError(f"expected every JSON key once, got {twice[:40]!r} twice.")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ArtifactError(f"expected finite JSON numbers, got {text}.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ArtifactError(f"expected finite JSON numbers, got {text[:40]}.")
    return value


def _bounded(text: str) -> int:
    # Converting longer digits would take quadratic time before any range check could see the value.
    if len(text) > 20:
        raise ArtifactError(f"expected integers of at most 64 bits, got {text[:40]}.")
    return int(text)
