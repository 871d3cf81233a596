"""A quantized model whose quantizers are switched on and off by an argument.

To measure each layer's cost, the model runs with many different sets of quantizers. If the set were part of the
program, each would need its own compilation. Here a vector of booleans, one per quantizer, is an argument, so one
compiled function serves every set.

Each tensor exists twice: as codes and as a float tensor. Every operation computes both, its fake-quantized form on the
codes and its primitive on the floats. The booleans choose between the two at a quantizer, at an operation that reads a
quantized and a float tensor, and at the output. With all quantizers on, the result is the quantized model's; with all
off, the float model's. No operation reads codes that are not integers. The only exception is the carry of a scan, which
is dequantized between iterations, whereas the quantized model carries the codes.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.ops import Deferred, Quantized, real
from qjax.tracing import Equation, Evaluation, Params, Place, Taps, Value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Either(Deferred):
    """A tensor in both forms, and a flag that selects one of them.

    coded: codes or an accumulator, valid if its quantizer is on. plain: the float tensor in the model's dtype. on: bool
    scalar, whether `coded` counts.
    """

    coded: Deferred
    plain: jax.Array
    on: jax.Array

    @property
    def dtype(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plain.dtype

    def real32(self) -> jax.Array:
        return jnp.where(self.on, self.coded.real32(), self.plain.astype(jnp.float32))

    def real(self) -> jax.Array:
        return jnp.where(self.on, self.coded.real(), self.plain)


@dataclasses.dataclass(frozen=True)
class SwitchedEvaluation(Evaluation):
    """An evaluation in which `switches[name]`, a bool scalar, turns a quantizer on."""

    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def _equation(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        choices = [x for x in inputs if isinstance(x, Either)]
        if not choices or self.annotation.ops.get(eqn) is None:
            return super()._equation(eqn, [real(x) for x in inputs])
        plain = super()._equation(eqn, [real(x) for x in inputs])
        coded = super()._equation(eqn, [x.coded if isinstance(x, Either) else x for x in inputs])
        on = choices[0].on
        for other in choices[1:]:
            on = jnp.logical_and(on, other.on)
        return [
            Either(c, p, on) if isinstance(c, Deferred) else jnp.where(on, c, p)
            for c, p in zip(coded, plain, strict=True)
        ]

    def _observed(self, value: Value, x: Any, params: Params, taps: Taps) -> Any:
        result = super()._observed(value, x, params, taps)
        if result is x or not isinstance(result, Either) or not isinstance(result.coded, Quantized):
            return result
        return Either(dataclasses.replace(result.coded, dtype=value.dtype), real(x), result.on)

    def _at(self, place: Place, x: Any, params: Params, taps: Taps) -> Any:
        quantized = super()._at(place, x, params, taps)
        x = x.real32() if isinstance(x, Deferred) else jnp.asarray(x)
        return Either(quantized, x, self.switches[place.name]) if isinstance(quantized, Quantized) else quantized

    def averaged(self, place: Place, x: Any, nearest: Quantized) -> Quantized:
        if not isinstance(x, Either):
            return super().averaged(place, x, nearest)
        averaged = super().averaged(place, x.coded, nearest)
        return dataclasses.replace(nearest, codes=jnp.where(x.on, averaged.codes, nearest.codes))


class SwitchedModel:
    """A quantized model in evaluation mode, compiled once for all sets of quantizers; the model itself is not changed.

        switched = qjax.analysis.SwitchedModel(qmodel)
        for name in switched.names:
            print(name, loss(switched({name}, (x,)), labels))  # this quantizer alone

    `qmodel.trace(x).evaluate(only=...)` computes the same for one set, but compiles again for every other set.

    names: the quantizers, in the order of the switches.
    """

    def __init__(self, qmodel: QuantizedModel) -> None:
        self.names = tuple(name for name, _ in qmodel.plan.quantizers)
        graphdef, self._state = nnx.split(evaluation_copy(qmodel))
        names = self.names

        @jax.jit
        def run(state: Any, switches: jax.Array, args: tuple[Any, ...]) -> Any:
            model = nnx.merge(graphdef, state)
            own = {name: switches[index] for index, name in enumerate(names)}
            switched = functools.partial(SwitchedEvaluation, switches=own)
            return model.trace(*args).evaluate(evaluation=switched).output

        self._run = run

    def __call__(self, quantizers: Collection[str], args: tuple[Any, ...]) -> Any:
        """The output with these quantizers on and all others off."""
        return self._run(self._state, jnp.asarray(self.switches(quantizers)), args)

    def switches(self, quantizers: Iterable[str]) -> np.ndarray:
        """bool [quantizers]: True for those named."""
        wanted = set(quantizers)
        unknown = wanted - set(self.names)
        if unknown:
            raise ValueError(f"Unknown quantizers: {', '.join(sorted(unknown))}. Known: {', '.join(self.names)}.")
        return np.asarray([name in wanted for name in self.names], bool)
