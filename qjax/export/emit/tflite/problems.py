"""Collects everything that a .tflite file cannot hold, so that one error names all of it."""

import dataclasses

from qjax.export.ir import Node


class Unsupported(Exception):
    """One node that cannot be written: why, and what to do instead."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why, self.cure = why, cure


@dataclasses.dataclass(frozen=True)
class Problem:
    """What cannot be written: a node or a tensor, the user's "file:line", why, and a cure."""

    what: str
    location: str | None
    why: str
    cure: str

    def __str__(self) -> str:
        where = f" ({self.location})" if self.location else ""
        return f"{self.what}{where}: {self.why}. {self.cure}"


@dataclasses.dataclass
class Problems:
    """The nodes and tensors that a .tflite file cannot hold."""

    found: list[Problem] = dataclasses.field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Each in one line."""
        return [str(problem) for problem in self.found]

    def add(self, node: Node, why: str, cure: str) -> None:
        """A node that cannot be written."""
        self.found.append(Problem(f"{node.op} {node.name!r}", node.location, why, cure))

    def add_tensor(self, name: str, why: str, cure: str) -> None:
        """A tensor that cannot be written."""
        self.found.append(Problem(f"tensor {name!r}", None, why, cure))

    def refuse(self) -> None:
        """Raise if there are any."""
        if self.lines:
            listed = "\n".join(f"  {line}" for line in self.lines)
            raise ValueError(f"emit: {len(self.lines)} parts of the graph have no form in a .tflite file:\n{listed}")
