"""One call of a quantized model, traced but not yet run: its equations, its quantizers, and several ways to run it."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from flax import nnx

from qjax.layers import Traced, write_state
from qjax.numerics.gradient_codes import Gradients
from qjax.ops.backward import of_step
from qjax.tracing import Annotation, Evaluation, Params, Place, Quantizer, Recorder, Taps

OWN: Literal["own"] = "own"
"""Quantize as the model itself does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
    """The result of `Call.evaluate`.

    output: what the model's `__call__` returns, in its own structure. recorded: label of a tensor -> what the recorder
    returned for it, with a leading axis for each scan around it. values: the outputs of the traced program in its
    order, followed by the model's variables; `Call.write` takes them.
    """

    output: Any
    recorded: Taps
    values: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a quantized model, made by `qmodel.trace(*args, **kwargs)`.

    Use it for forward passes that differ from the model's own: some quantizers off, another rounding, tensors recorded.
    It changes nothing by itself, and it works inside of `jit`, `grad` and `vmap` as the model does.

        call = qmodel.trace(x)
        call.evaluate().output                             # qmodel(x)
        call.evaluate(quantize=None).output                # the float model
        call.evaluate(only={"input", "fc1/kernel"}).output   # two quantizers on, all others off
        call.evaluate(record=lambda place, x, quantized: jnp.max(x)).recorded   # label -> the tensor's maximum

    traced: the program, the names of its inputs, and their arrays. annotation: which operation each equation is, and
    which tensors have which quantizer. gradients: see `Recipe`. Do not change any of them.
    """

    traced: Traced
    annotation: Annotation
    _module: nnx.Module
    _shared: frozenset[str]
    _quantize: Quantizer
    _params: Callable[[], Params]
    gradients: Gradients | None = None

    @property
    def places(self) -> Mapping[str, Place]:
        """Label of each tensor with a quantizer -> its place, in the order of execution."""
        found = (*self.annotation.values.values(), *self.annotation.weights.values())
        return {place.label: place for place in found}

    def quantize(self, place: Place, params: Any, x: Any) -> Any:
        """Quantize one tensor as the model does: the default of `evaluate`, and the fallback in your own function.

        Args:
          place: the tensor, as `evaluate` passes it. params: its quantizer's arrays, see
            `QuantizedModel.quantizer_values`. x: its float values.

        Returns:
          `qjax.ops.Quantized`: codes without the zero point in float32, and their scale.
        """
        return self._quantize(place, params, x)

    def evaluate(
        self,
        *,
        quantize: Quantizer | Literal["own"] | None = OWN,
        only: Collection[str] | None = None,
        record: Recorder | None = None,
        params: Params | None = None,
        averages: bool = True,
        evaluation: Callable[..., Evaluation] = Evaluation,
    ) -> Evaluated:
        """Run the call. Without arguments it computes what the model computes; the model's state does not change.

        Args:
          quantize: `(place, params, x) -> Quantized`, or None where that tensor is to stay in floats. "own" quantizes
            as the model does; None quantizes nothing.
          only: names of quantizers; all others are off. None leaves all on.
          record: `(place, x, quantized or None) -> what to keep`, called for every tensor with a quantizer; None keeps
            nothing of that tensor.
          params: name of a quantizer -> its arrays. None takes the model's own.
          averages: whether averages (mean, average pooling) follow the target's own formula; otherwise `quantize`
            alone decides their codes.
          evaluation: a subclass of `qjax.tracing.Evaluation`.

        Raises:
          ValueError: `only` names a quantizer that the model does not have.
        """
        chosen = self._quantize if isinstance(quantize, str) else quantize
        if only is not None:
            chosen = self._restrict(chosen, frozenset(only))
        run = evaluation(self.annotation, chosen, record, self._shared, averages=averages)
        params = self._params() if params is None else params
        with of_step(self.gradients):
            values, recorded = run.run(self.traced.program, self.traced.args, params)
        return Evaluated(self.traced.outputs(values), recorded, values)

    def write(self, evaluated: Evaluated) -> None:
        """Store the variables that the call updated (such as batch-norm statistics in training) in the model."""
        changed = self.traced.new_state(evaluated.values)
        if changed is not None:
            write_state(self._module, changed)

    def _restrict(self, quantize: Quantizer | None, only: frozenset[str]) -> Quantizer:
        known = {place.name for place in self.places.values()}
        if only - known:
            raise ValueError(
                f"evaluate: expected names of this call's quantizers in `only`, got {sorted(only - known)!r}. It has: "
                f"{', '.join(dict.fromkeys(place.name for place in self.places.values()))}."
            )

        def restricted(place: Place, params: Any, x: Any) -> Any:
            return quantize(place, params, x) if quantize is not None and place.name in only else None

        return restricted
