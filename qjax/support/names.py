"""New names beside those that are in use, and the known name that a wrong one is nearest to."""

import difflib
import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

MAX_NAME = 2**16
"""Characters of a name in a graph: of an attribute path of a model, of keys of what it takes and returns."""


class Names:
    """Names in use; `fresh` returns a new one: the wanted name, or the same with a number from 2 on.

    taken: what is in use from the start. between: the text before the number. bare: False numbers
      every name, from 0 on.
    beside: holds further names in use, and may grow.
    """

    def __init__(
        self, taken: Iterable[str] = (), *, between: str = "_", bare: bool = True, beside: Container[Any] = ()
    ) -> None:
        self._taken, self._between, self._bare, self._beside = set(taken), between, bare, beside
        self._counts: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._taken or name in self._beside

    def add(self, *names: str) -> None:
        """Take names as they are."""
        self._taken.update(names)

    def free(self, wanted: str, first: int = 0) -> str:
        """A name that is not in use; it stays free. first: the least number behind it."""
        count = max(self._counts.get(wanted, 1 if self._bare else -1), first - 1)
        name = wanted
        while name in self or (name == wanted and not self._bare):
            count += 1
            name = f"{wanted}{self._between}{count}"
        self._counts[wanted] = count
        return name

    def fresh(self, wanted: str, first: int = 0) -> str:
        """A name that is not in use, and now is."""
        name = self.free(wanted, first)
        self._taken.add(name)
        return name


def lengthened(name: str, taken: Container[str], mark: str = "_") -> str:
    """The name, with as many marks behind it as make it one that is not taken."""
    while name in taken:
        name += mark
    return name


def check_options(what: str, functions: Iterable[Callable[..., Any]], options: Iterable[str]) -> None:
    """Raise a TypeError for an option that a function does not have; the next ones are those it hands options on to."""
    known: list[str] = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        known += [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    for name in options:
        if name not in known:
            listed = f"Its options: {', '.join(known)}." if known else "It has none."
            raise TypeError(f"{what}: there is no option {name!r}.{did_you_mean(name, known)} {listed}")


def short_location(location: str | None) -> str | None:
    """A place "file:line" with the file's folder at most: files that are handed on do not tell of the machine."""
    return None if location is None else "/".join(location.replace("\\", "/").split("/")[-2:])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, to follow an error's sentence, or "" where nothing is near."""
    if not isinstance(name, str):
        return ""
    names = list(known)
    folded = {one.lower().replace("-", "_"): one for one in names}
    plain = name.lower().replace("-", "_")
    found = difflib.get_close_matches(plain, folded, n=1, cutoff=0.6)
    # By letters "micro" is far from "tflite_micro", but it is a part of it.
    parts = [one for key, one in folded.items() if len(plain) > 2 and plain in key]
    best = folded[found[0]] if found else parts[0] if len(parts) == 1 else None
    return "" if best is None else f" Did you mean {best!r}?"
