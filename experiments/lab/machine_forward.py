"""The forward of a whole quantized network as a machine of `machines` multiplies it, in two ways."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from experiments.lab.machines import FLOAT32, Machine
from qjax.ops import Quantized
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.tracing import Evaluation


@dataclasses.dataclass(frozen=True)
class OnMachine(Evaluation):
    """An evaluation whose products read operands that the machine can hold; sums and all else are those of the program.

    classic: a product, a bias and a norm read fake-quantized floats, as the program has them. Otherwise products read
    the codes less their zero points, as qjax does, and the finished sum is scaled.
    """

    machine: Machine = FLOAT32
    classic: bool = False

    def _equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if isinstance(self.annotation.ops.get(eqn, (None,))[0], (Conv, Dot)):
            inputs = [self._operand(x) for x in inputs]
        return super()._equation(eqn, inputs)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Quantized):
            return dataclasses.replace(x, codes=self.machine.operand(x.codes))
        return self.machine.operand(x) if isinstance(x, jax.Array) else x

    def _at(self, place: Any, x: Any, params: Any, taps: Any) -> Any:
        found = super()._at(place, x, params, taps)
        return found.real32() if self.classic and isinstance(found, Quantized) else found


def scores_on(model: qjax.QuantizedModel, images: np.ndarray, machine: Machine, classic: bool, batch: int) -> Any:
    """Class scores [n, classes] of a quantized model in evaluation mode, float32."""
    graphdef, state = nnx.split(model)
    evaluation = functools.partial(OnMachine, machine=machine, classic=classic)

    @jax.jit
    def run(state: Any, x: jax.Array) -> Any:
        return nnx.merge(graphdef, state).trace(x).evaluate(evaluation=evaluation).output

    return np.concatenate([np.asarray(run(state, images[i : i + batch])) for i in range(0, len(images), batch)])
