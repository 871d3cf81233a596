"""Which facts an operation must state itself, because a forgotten one would otherwise seem harmless.

| operation | must state | if it were forgotten |
| --- | --- | --- |
| every one | the abstract methods | sums could overflow, examples of a batch could mix |
| every one | `fields` | a misspelt attribute would pass, a missing one would fail in the middle of a run |
| GRID, and CHAIN on a grid | `filling` | numbers outside of the input's range would be clipped silently |
| PRODUCER | `takes_steps` | steps after it would be folded into constants that cannot hold them |
| PRODUCER that does not prepare | `operation` | the exact sum would replace the runtime's own formula |
| the same without a weight | `scales` | the scales of further inputs would be ignored |
| with `prepare` | `restated` | another target would keep the constants of the first |
| CHAIN | `clamps`, `compose`, `has_integer_form` | the step would be dropped silently |
| CHAIN that clamps | `bounds` | the same |
| with `bounds` | `clamps = True` | an affine step after the clamp would be folded in front of it |
| with `integers` | `refuses`, `misplaced` | an index out of range would be clipped silently |
| with `weight_axes` | `channels` | scales of channels would be applied along another axis |
"""

import inspect
from collections.abc import Collection
from typing import Any

from qjax.ops.facts import CountsProducts, Role


def missing(cls: type, bases: Collection[type]) -> list[str]:
    """The names of the facts that an operation must state but does not; bases: the classes that define the defaults."""

    def states(name: str) -> bool:
        return next(base for base in cls.__mro__ if name in vars(base)) not in bases

    declared = {name for base in cls.__mro__ for name in inspect.get_annotations(base) if not hasattr(cls, name)}
    names = {*getattr(cls, "__abstractmethods__", ()), *declared}
    names |= {name for name in _required(cls, states) if not states(name)}
    return sorted(names)


def _required(cls: type, states: Any) -> set[str]:
    role, names = getattr(cls, "role", None), set[str]()
    if role is Role.GRID or getattr(cls, "on_grid", False):
        names.add("filling")
    if role is Role.PRODUCER:
        names.add("takes_steps")
        if not states("prepare"):
            names |= {"operation"} if issubclass(cls, CountsProducts) else {"operation", "scales"}
    if role is Role.CHAIN:
        names |= {"clamps", "compose", "has_integer_form"}
        names |= {"bounds"} if getattr(cls, "clamps", False) else set()
    for one, other in (("prepare", "restated"), ("integers", "refuses"), ("integers", "misplaced")):
        names |= {other} if states(one) else set()
    names |= {"channels"} if states("weight_axes") else set()
    return names
