"""The result of a check: every violation with its place, what was expected, what came, and the cure."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from qjax.contrib.profiles.base import Profile
from qjax.support.errors import Unsupported


class ProfileError(Unsupported):
    """A model or a recipe breaks rules of its profile; the message lists all of them.

    Examples:
      ```python
      try:
          qjax.Recipe(profile="ethos_u", weights=qjax.QSpec(bits=4))
      except ValueError as error:
          print(error)
      ```
    """


@dataclasses.dataclass(frozen=True)
class Violation:
    """One rule that one operator, tensor or spec breaks.

    Attributes:
      rule: the rule's name.
      node: the node of the graph, with the operator of the file; or the name of a quantizer.
      expected: the requirement.
      came: what there is instead.
      cure: what to do about it.
      source: the page or code that states the rule.
      location: the user's "file:line".

    Examples:
      ```python
      for violation in graph.check("tensorrt").violations:
          print(violation.rule, violation.node, violation.cure)
      ```
    """

    rule: str
    node: str
    expected: str
    came: str
    cure: str
    source: str = ""
    location: str | None = None

    def __str__(self) -> str:
        where = f" ({self.location})" if self.location else ""
        source = f" [{self.source}]" if self.source else ""
        said = f"{self.node}{where}: expected {self.expected}, got {self.came}"
        return f"{said.rstrip('.')}. {self.cure}{source}".rstrip()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A check's result; `str()` lists every violation.

    Attributes:
      profile: the device.
      violations: every violation; empty if the device supports everything.
      operators: (name, count) of the operators that were checked.

    Examples:
      ```python
      verdict = graph.check("tensorrt")
      print(verdict)  # every violation, with the rule's source and a cure
      print(len(verdict.violations))
      ```
    """

    profile: Profile
    violations: tuple[Violation, ...]
    operators: tuple[tuple[str, int], ...] = ()

    @property
    def passes(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def __bool__(self) -> bool:
        return self.passes

    def __str__(self) -> str:
        total = sum(count for _, count in self.operators)
        listed = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in self.operators)
        head = f"{self.profile.name} ({self.profile.title})"
        checked = f"{total} operators: {listed}" if total else "the recipe's specs"
        if self.passes:
            return f"{head}: no rule is broken.\n{checked}\n{self.profile.proof}"
        return f"{head}: {refused(self.profile, self.violations)}\n{checked}"

    def document(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {
            "profile": self.profile.name,
            "passes": self.passes,
            "operators": dict(self.operators),
            "violations": [dataclasses.asdict(violation) for violation in self.violations],
        }

    def refuse(self, what: str) -> None:
        """Raise a ProfileError if any rule is broken. what: the calling function, for the message."""
        if self.violations:
            raise ProfileError(f"{what}: profile {self.profile.name!r}: {refused(self.profile, self.violations)}")


def refused(profile: Profile, violations: Sequence[Violation]) -> str:
    """List all violations, one per line."""
    count = "1 rule is broken" if len(violations) == 1 else f"{len(violations)} rules are broken"
    lines = "\n".join(f"  {violation}" for violation in violations)
    return f"{count}; {profile.otherwise}:\n{lines}"
