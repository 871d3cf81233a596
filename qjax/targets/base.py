"""A Target bundles the rounding choices of one runtime; the conversion writes them into the graph's nodes."""

import dataclasses

from qjax.numerics.rounding import Rounding
from qjax.numerics.rules import rule_names


@dataclasses.dataclass(frozen=True)
class Target:
    """The arithmetic of a runtime.

    name: how recipes and graphs refer to it.
    requantize: rule for the accumulators of matrix products and convolutions (`numerics.requantize`).
    rounding: of the one right shift behind additions, products, sums and rescales, which are kept in 64 bits.
    """

    name: str
    requantize: str = "nearest_even"
    rounding: Rounding = Rounding.NEAREST_EVEN

    def __post_init__(self) -> None:
        if self.requantize not in rule_names():
            raise ValueError(
                f"Target {self.name!r}: unknown rule {self.requantize!r}. Known rules: {', '.join(rule_names())}."
            )
        if self.requantize == "stochastic" or Rounding.of(self.rounding) is Rounding.STOCHASTIC:
            raise ValueError(
                f"Target {self.name!r}: a target is deterministic; stochastic rounding needs a key per call."
            )
        object.__setattr__(self, "rounding", Rounding.of(self.rounding))


_targets: dict[str, Target] = {}


def register(target: Target) -> Target:
    """Make a target known by its name, so that recipes and saved graphs can refer to it."""
    if _targets.setdefault(target.name, target) != target:
        raise ValueError(f"Another target is registered under the name {target.name!r}.")
    return target


def get(name: "str | Target") -> Target:
    """The target of that name; a Target is returned as it is."""
    if isinstance(name, Target):
        return name
    if name not in _targets:
        raise ValueError(f"Unknown target {name!r}. Known targets: {', '.join(names())}.")
    return _targets[name]


def names() -> tuple[str, ...]:
    """The names of all registered targets."""
    return tuple(sorted(_targets))


register(Target("nearest_even"))
register(Target("single_round", "single_round", Rounding.NEAREST_UP))
register(Target("double_round", "double_round", Rounding.NEAREST_AWAY))
