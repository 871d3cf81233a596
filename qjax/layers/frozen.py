"""Parameters that a model stores as codes, and that are floats again while the model is traced."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from qjax.ops.frozen import Frozen
from qjax.tracing.rewrites.frozen import thaw


class FrozenParam(nnx.Variable[Any]):
    """A parameter stored as a tuple of packed codes and their scales. It is not an `nnx.Param`, so it is not trained.

    Its metadata: `frozen`, a `qjax.ops.frozen.Frozen`; `kind`, the class of the variable that it replaces; and
    `described`, the metadata of that variable.
    """

    @classmethod
    def of(cls, variable: nnx.Variable[Any], frozen: Frozen, packed: tuple[Any, ...]) -> "FrozenParam":
        """Make the frozen form of a variable."""
        described = tuple(variable.get_metadata().items())
        return cls(packed, frozen=frozen, kind=type(variable), described=described)

    def thawed(self) -> nnx.Variable[Any]:
        """The original variable, with the floats that the codes represent."""
        frozen = self.get_metadata("frozen")
        value = thaw(frozen, self.get_raw_value())
        return self.get_metadata("kind")(value, **dict(self.get_metadata("described")))


def frozen_parameters(model: nnx.Module) -> Iterator[tuple[Any, str, FrozenParam]]:
    """(owner, name, parameter) of each frozen parameter; one that several modules share comes with each of them."""
    seen = set[int]()
    for _, owner in nnx.iter_graph(model):
        if isinstance(owner, nnx.Variable) or id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in tuple(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, FrozenParam):
                yield owner, name, value


def replace_all(places: list[tuple[Any, str, FrozenParam]]) -> None:
    """Replace frozen parameters by floats."""
    known: dict[int, nnx.Variable[Any]] = {}
    for owner, name, parameter in places:
        if id(parameter) not in known:
            known[id(parameter)] = parameter.thawed()
        setattr(owner, name, known[id(parameter)])


def put_back(places: list[tuple[Any, str, FrozenParam]]) -> None:
    """Undo `replace_all`."""
    for owner, name, parameter in places:
        setattr(owner, name, parameter)
