"""What has no form: in integers, in a file of a runtime, in C. One error for a part, and a list of such errors."""

import dataclasses


class Unsupported(ValueError):
    """One part of a model that cannot be expressed.

    what: the part (a node, an operator, a tensor), "" where only the caller knows it. why. cure: what to do instead.
    where: the user's "file:line".
    """

    def __init__(self, why: str, cure: str = "", *, what: str = "", where: str | None = None) -> None:
        super().__init__(why)
        self.what, self.why, self.cure, self.where = what, why, cure, where

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        part = f"{self.what}{where}: " if self.what else ""
        return f"{part}{self.why}. {self.cure}" if self.cure else f"{part}{self.why}"

    def at(self, what: str, where: str | None = None) -> "Unsupported":
        """The same reason, of a part that is named."""
        return Unsupported(self.why, self.cure, what=what, where=where)


@dataclasses.dataclass
class Problems:
    """Everything that was found, so that one error names all of it."""

    found: list[Unsupported] = dataclasses.field(default_factory=list)

    def add(self, what: str, why: str, cure: str = "", where: str | None = None) -> None:
        """One more part without a form."""
        self.found.append(Unsupported(why, cure, what=what, where=where))

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def lines(self) -> list[str]:
        """Each part in one line."""
        return [str(problem) for problem in self.found]
