"""Equations that read only constants. They are computed here and need no node."""

from typing import Any

import jax

from qjax.export.lowering.values import Constant
from qjax.tracing import Equation


class Evaluation:
    """Runs equations; what no iteration of a scan changes is computed once."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}

    def outputs(self, eqn: Equation, found: list[Constant]) -> list[Constant]:
        """The outputs of an equation whose inputs are all constants."""
        values = [f.value for f in found]
        key = (eqn, *map(id, values))
        if key not in self._results:
            # keep the inputs alive, so that no other object gets their id
            self._results[key] = values, _computed(eqn, values)
        return [Constant(result) for result in self._results[key][1]]


def _computed(eqn: Equation, values: list[Any]) -> list[Any]:
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eqn.outputs]
    return eqn.bind(*(jax.numpy.asarray(value) for value in values))
