"""Errors for parts of a model that cannot be expressed: one error per part, and lists of them."""

import dataclasses
from collections.abc import Iterable

_SHOWN = 20
"""The most messages that one error lists."""


class Unsupported(ValueError):
    """One part of a model that cannot be expressed: in integers, in a format, or on a device.

    Attributes:
      what: the part (a node, an operator, a tensor), "" if the reason names it.
      why: the reason. cure: what to do instead, "" if the reason includes it.
      where: the user's "file:line", None if it is unknown.

    Examples:
      ```python
      def sine(w, x):
          return jnp.sin(x @ w)


      floats = qjax.Recipe(overrides={".*": qjax.FLOAT})
      graph = qjax.convert(
          qjax.quantize(qjax.from_function(sine, np.eye(8, dtype=np.float32)), floats, x), x
      )
      try:
          graph.emit("c", "firmware")
      except qjax.Unsupported as error:
          print(error)
      ```
    """

    def __init__(self, why: str, cure: str = "", *, what: str = "", where: str | None = None) -> None:
        super().__init__(why)
        self.what, self.why, self.cure, self.where = what, why, cure, where

    def __str__(self) -> str:
        place = f" ({self.where})" if self.what and self.where else self.where or ""
        part = f"{self.what}{place}: " if self.what or place else ""
        return f"{part}{self.why}. {self.cure}" if self.cure else f"{part}{self.why}"

    def at(self, what: str, where: str | None = None) -> "Unsupported":
        """The same reason for a named part."""
        return Unsupported(self.why, self.cure, what=what, where=where)


@dataclasses.dataclass
class Problems:
    """Collects all problems, so that one error can list them."""

    found: list[Unsupported] = dataclasses.field(default_factory=list)

    def add(self, what: str, why: str, cure: str = "", where: str | None = None) -> None:
        """Add a part that cannot be expressed."""
        self.found.append(Unsupported(why, cure, what=what, where=where))

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def lines(self) -> list[str]:
        """Each part as one line."""
        return [str(problem) for problem in self.found]


def refuse(wrong: Iterable[str]) -> None:
    """Raise one ValueError that lists all of these messages, one per line; does nothing if there are none."""
    found = list(dict.fromkeys(wrong))
    if found:
        more = [f"... and {len(found) - _SHOWN} more of this kind."] if len(found) > _SHOWN else []
        raise ValueError("\n".join([*found[:_SHOWN], *more]))
