"""Collects everything that a .tflite file cannot hold, so that one error names all of it."""

import dataclasses

from qjax.export.ir import Node


class Unsupported(Exception):
    """One node that cannot be written: why, and what to do instead."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why, self.cure = why, cure


@dataclasses.dataclass
class Problems:
    """The nodes and tensors that a .tflite file cannot hold."""

    lines: list[str] = dataclasses.field(default_factory=list)

    def add(self, node: Node, why: str, cure: str) -> None:
        """A node that cannot be written."""
        where = f" ({node.location})" if node.location else ""
        self.lines.append(f"{node.op} {node.name!r}{where}: {why}. {cure}")

    def add_tensor(self, name: str, why: str, cure: str) -> None:
        """A tensor that cannot be written."""
        self.lines.append(f"tensor {name!r}: {why}. {cure}")

    def refuse(self) -> None:
        """Raise if there are any."""
        if self.lines:
            listed = "\n".join(f"  {line}" for line in self.lines)
            raise ValueError(f"emit: {len(self.lines)} parts of the graph have no form in a .tflite file:\n{listed}")
