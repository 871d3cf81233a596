"""The base class of operations that only move or select codes."""

from collections.abc import Sequence
from typing import Any

from qjax.ops.base import Bounds, Equation, Op, Quantized, Role, Site, real


class GridOp(Op):
    """The same primitive on codes as on floats; the output has the input's scale and zero point."""

    role = Role.GRID

    def accumulator(self, site: Site) -> Bounds | None:
        # these operations do not add codes: a sum would need another scale
        return None

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, *rest = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(*(real(x) for x in inputs))
        return [x.with_codes(out) for out in eqn.bind(x.codes, *rest)]
