"""Generates unused names, and finds the known name that is nearest to a wrong one."""

import difflib
import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

MAX_NAME = 2**16
"""The most characters of a name in a graph, which may be the attribute path of a model or keys of its inputs."""


class Names:
    """A set of used names; `fresh` returns an unused one: the wanted name, or the same with a number from 2 on.

    taken: the names used from the start. between: the text before the number. bare: if False, every name is numbered,
      from 0 on.
    beside: a container of further used names, which may grow.
    """

    def __init__(
        self, taken: Iterable[str] = (), *, between: str = "_", bare: bool = True, beside: Container[Any] = ()
    ) -> None:
        self._taken, self._between, self._bare, self._beside = set(taken), between, bare, beside
        self._counts: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._taken or name in self._beside

    def add(self, *names: str) -> None:
        """Mark names as used."""
        self._taken.update(names)

    def free(self, wanted: str, first: int = 0) -> str:
        """An unused name, which stays unused. first: the least number to append."""
        count = max(self._counts.get(wanted, 1 if self._bare else -1), first - 1)
        name = wanted
        while name in self or (name == wanted and not self._bare):
            count += 1
            name = f"{wanted}{self._between}{count}"
        self._counts[wanted] = count
        return name

    def fresh(self, wanted: str, first: int = 0) -> str:
        """An unused name, which is used from now on."""
        name = self.free(wanted, first)
        self._taken.add(name)
        return name


def lengthened(name: str, taken: Container[str], mark: str = "_") -> str:
    """The name, with marks appended until it is not taken."""
    while name in taken:
        name += mark
    return name


def check_options(what: str, functions: Iterable[Callable[..., Any]], options: Iterable[str]) -> None:
    """Raise a TypeError for an unknown option; each function may pass its options on to the next ones."""
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
    """A place "file:line" with at most the file's own folder, so that files that are shared reveal no local paths."""
    return None if location is None else "/".join(location.replace("\\", "/").split("/")[-2:])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, to be appended to an error, or "" if no name is near."""
    if not isinstance(name, str):
        return ""
    names = list(known)
    folded = {one.lower().replace("-", "_"): one for one in names}
    plain = name.lower().replace("-", "_")
    found = difflib.get_close_matches(plain, folded, n=1, cutoff=0.6)
    # "micro" is far from "tflite_micro" in letters, although it is a part of it.
    parts = [one for key, one in folded.items() if len(plain) > 2 and plain in key]
    best = folded[found[0]] if found else parts[0] if len(parts) == 1 else None
    return "" if best is None else f" Did you mean {best!r}?"
