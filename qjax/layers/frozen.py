"""Parameters that a model holds as codes; while the model is traced they are what its own code expects."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from qjax.ops.frozen import Frozen
from qjax.tracing.rewrites.frozen import thaw


class FrozenParam(nnx.Variable[Any]):
    """A parameter of the model as packed codes and their scales: a tuple of arrays. No `nnx.Param`, so nothing trains.

    Its metadata: frozen, a `qjax.ops.frozen.Frozen`; kind, the class of variable that it was, and described, the
    metadata of that variable.
    """

    @classmethod
    def of(cls, variable: nnx.Variable[Any], frozen: Frozen, packed: tuple[Any, ...]) -> "FrozenParam":
        """In the place of a variable."""
        described = tuple(variable.get_metadata().items())
        return cls(packed, frozen=frozen, kind=type(variable), described=described)

    def thawed(self) -> nnx.Variable[Any]:
        """The variable that it was, with the floats that the codes stand for."""
        frozen = self.get_metadata("frozen")
        value = thaw(frozen, self.get_raw_value())
        return self.get_metadata("kind")(value, **dict(self.get_metadata("described")))


def frozen_parameters(model: nnx.Module) -> Iterator[tuple[Any, str, FrozenParam]]:
    """(owner, name, parameter) of each; one that several modules share comes with each of them."""
    seen = set[int]()
    for _, owner in nnx.iter_graph(model):
        if isinstance(owner, nnx.Variable) or id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in tuple(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, FrozenParam):
                yield owner, name, value


def replace_all(places: list[tuple[Any, str, FrozenParam]]) -> None:
    """Put floats in the places of frozen parameters."""
    known: dict[int, nnx.Variable[Any]] = {}
    for owner, name, parameter in places:
        if id(parameter) not in known:
            known[id(parameter)] = parameter.thawed()
        setattr(owner, name, known[id(parameter)])


def put_back(places: list[tuple[Any, str, FrozenParam]]) -> None:
    """The inverse of `replace_all`."""
    for owner, name, parameter in places:
        setattr(owner, name, parameter)
