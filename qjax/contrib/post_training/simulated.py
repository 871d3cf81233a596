"""Fake quantization in which every number is an argument: scales, zero points, widths, and which quantizers are on.

In the quantized model's own forward the widths are constants of the program, so every width needs a compilation.
Post-training quantization tries hundreds. Here a quantizer rounds a float tensor by the formula of all codes
(`numerics.affine.round_to_grid`), and its numbers are arguments, so one program serves all choices, and also the float
model (all quantizers off).

It is an estimate. Between quantizers it computes in floats, so it leaves out the rounding inside softmax, normalisation
and tables, and that of the bias. The final choice is measured on the true forward.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.calibration.learned import Quantizer, with_scales
from qjax.model.quantized_model import QuantizedModel
from qjax.model.quantizer_numbers import OneArray
from qjax.numerics.affine import QParams, broadcast_to_tensor, centered_bounds, round_to_grid
from qjax.numerics.rounding import Rounding
from qjax.ops.conv import Conv
from qjax.tracing import Equation, Evaluation, Place, Program, Taps, Value
from qjax.training.scan_layers import Stacks, quantizer_of, split

Grid = dict[str, Any]
"""scale: as the quantizer stores it. low, high: float32, the least and the greatest code without the zero point. on:
bool, with the shape of the scans around the tensor."""


def grid_of(q: Quantizer, qparams: QParams | None) -> Grid:
    """The grid of one quantizer; without parameters its scale follows the tensor."""
    on = np.ones(q.stack, bool)
    if qparams is None:
        return {"on": on}
    scale = np.asarray(qparams.scale, np.float32)
    zero_point = np.asarray(qparams.integer_zero_point(), np.int32)
    low, high = q.spec.qmin - zero_point, q.spec.qmax - zero_point
    return {"scale": scale, "low": low.astype(np.float32), "high": high.astype(np.float32), "on": on}


def grids_of(qmodel: QuantizedModel) -> dict[str, Grid]:
    """The grid of every quantizer of a model, with its present numbers."""
    known = qmodel.qparams()
    return {name: grid_of(q, known.get(name)) for name, q in qmodel.plan.quantizers}


def switched(grids: Mapping[str, Grid], names: Iterable[str]) -> dict[str, Grid]:
    """The same numbers with only these quantizers on."""
    chosen = set(names)
    return {name: {**grid, "on": np.full_like(grid["on"], name in chosen)} for name, grid in grids.items()}


def set_qparams(qmodel: QuantizedModel, name: str, qparams: QParams) -> QParams:
    """Set the numbers of a quantizer; returns them as it will use them (a method may round its scales).

    name: of a quantizer, or of one layer of a scan.
    """
    by_name = qmodel.plan.by_name
    base, index = split(name, by_name)
    for key, value in quantizer_of(by_name, name).init(qparams).items():
        array: OneArray = getattr(qmodel.quantizers[base], key)
        array[index or ...] = value
    return qparams_of(qmodel, name)


def qparams_of(qmodel: QuantizedModel, name: str) -> QParams:
    """The numbers of one quantizer, whose scale must not follow its tensor."""
    q, whole = quantizer_of(qmodel.plan.by_name, name), split(name, qmodel.plan.by_name)[0]
    values = Stacks({whole: qmodel.quantizers[whole].values()})[name]
    return q.qparams(with_scales({name: q}, {name: values})[name])


@dataclasses.dataclass(frozen=True)
class Simulated(Evaluation):
    """An evaluation in float whose quantizers are `Grid`s; `quantizers` are those of the plan."""

    quantizers: Mapping[str, Quantizer] = dataclasses.field(default_factory=dict[str, Quantizer])

    def entered(self, value: Value, x: Any, grids: Mapping[str, Grid], taps: Taps) -> Any:
        """An input of the model, rounded if it has a quantizer."""
        return self._observed(value, x, grids, taps)

    def advance(
        self, equations: Sequence[Equation], env: dict[Value, Any], grids: Mapping[str, Grid], taps: Taps
    ) -> None:
        """Run some equations of the program; `env` holds their inputs, and receives their outputs."""
        for eqn in equations:
            inputs = inputs_of(eqn, env)
            for index, x in enumerate(inputs):
                place = self.annotation.weights.get((eqn, index))
                if place is not None:
                    inputs[index] = self._at(place, x, grids, taps)
            if eqn.body is None:
                outputs = self._equation(eqn, inputs)
            elif eqn.is_scan:
                outputs = self._scan(eqn, eqn.body, inputs, grids, taps, {})
            else:
                outputs = self._remat(eqn, eqn.body, inputs, grids, taps, {})
            for value, output in zip(eqn.outputs, outputs, strict=True):
                env[value] = self._observed(value, output, grids, taps)

    def names(self, inputs: Sequence[Value], equations: Sequence[Equation]) -> list[str]:
        """The quantizers of some equations and inputs."""
        return self._names(Program(tuple(inputs), (), tuple(equations)))

    def _equation(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        op = self.annotation.ops.get(eqn, (None,))[0]
        if isinstance(op, Conv):
            # Write a depthwise convolution in a form that XLA runs 30 times as fast on a CPU.
            x, w = inputs
            return [op.product(eqn)(x, w, eqn.out_dtypes[0], eqn.params["precision"])]
        return super()._equation(eqn, inputs)

    def _at(self, place: Place, x: Any, params: Any, taps: Any) -> Any:
        x = jnp.asarray(x)
        if self.record is not None:
            taps[place.label] = self.record(place, x, None)
        return rounded_to(self.quantizers[place.name], params[place.name], x)


def inputs_of(eqn: Equation, env: Mapping[Value, Any]) -> list[Any]:
    """The arrays that an equation reads."""
    return [value.constant if value.constant is not None else env[value] for value in eqn.inputs]


def rounded_to(q: Quantizer, grid: Grid, x: jax.Array) -> jax.Array:
    """The tensor rounded to a grid, in its own dtype; unchanged if the grid is off."""
    real = x.astype(jnp.float32)
    if q.follows_tensor:
        rounded = q({}, real).real32()
    else:

        def spread(value: Any) -> jax.Array:
            value = jnp.asarray(value)
            if q.spec.per_tensor:
                return jnp.reshape(value, (1,) * x.ndim)
            return broadcast_to_tensor(value, q.spec, x.shape)

        scale, low, high = (spread(grid[key]) for key in ("scale", "low", "high"))
        rounded = _on_grid(real, scale, low, high)
    return jnp.where(grid["on"], rounded, real).astype(x.dtype)


@jax.custom_jvp
def _on_grid(x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """The nearest number of the grid, with the gradient of a clip."""
    return jnp.clip(round_to_grid(x, scale, Rounding.NEAREST_EVEN), low, high) * scale


@_on_grid.defjvp
def _straight(numbers: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, scale, low, high = numbers
    inside = (x >= low * scale) & (x <= high * scale)
    return _on_grid(*numbers), jnp.where(inside, tangents[0], jnp.zeros_like(tangents[0]))


def bounds_of(qparams: QParams) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest code without the zero point, in the scale's shape."""
    low, high = centered_bounds(qparams.integer_zero_point(), qparams.spec.qmin, qparams.spec.qmax)
    return np.asarray(low), np.asarray(high)
