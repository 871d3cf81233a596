"""Runs an annotated program, either in float or with fake quantization of the tensors that have a quantizer.

It is a function transformation like JAX's own: it binds the equations one by one, so the caller's jit, grad, vmap,
scan, remat and sharding apply to them. The parameters of quantizers are arguments and never global state.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from qjax.numerics.fence import computed_once_on_cpu, finished_on_cpu
from qjax.numerics.meshes import WHOLE, in_automatic, placed_as, varying_alike, varying_as
from qjax.ops import Deferred, Pending, Quantized, backward, real
from qjax.ops.exact_float import ACCUMULATOR
from qjax.ops.float_bias import with_bias_of
from qjax.ops.recomputed import recomputed
from qjax.tracing import shared_traces
from qjax.tracing.annotate import Annotation, Place
from qjax.tracing.program import Equation, Program, Value

Params = Mapping[str, Any]
"""Per quantizer: a pytree of arrays; inside a scan, with a leading axis per scan.

A loop over time also passes an "elementwise_scale" to its steps, see `fake_quant_codes`.
"""

Known = Mapping[tuple[Equation, int], Any]
"""Weights inside of scans that are quantized before the scan, because no iteration changes them."""

Taps = dict[str, Any]
"""What was recorded, per label of a place; each scan around the place adds a leading axis."""

Quantizer = Callable[[Place, Any, jax.Array], Quantized | None]
"""(place, its parameters, real tensor) -> codes, or None to keep the tensor in float."""

Recorder = Callable[[Place, jax.Array, Quantized | None], Any]
"""(place, real tensor, its codes if it was quantized) -> what to record."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How to run a program.

    quantize: quantizes a tensor; None runs everything in float. record: called at every place; None records nothing.
    """

    annotation: Annotation
    quantize: Quantizer | None
    record: Recorder | None = None
    shared: frozenset[str] = frozenset()
    """Quantizers that all iterations of a scan share, so their parameters have no axis for the scan."""
    averages: bool = True
    """Whether averages are computed by the target's formula; otherwise by `quantize` alone."""
    joined: bool = False
    """Whether `record` also sees the results in `Annotation.joined`, which have no quantizer of their own."""

    def run(self, program: Program, args: Sequence[Any], params: Params) -> tuple[list[Any], Taps]:
        """Evaluate the program; returns the outputs as real arrays, and what was recorded."""

        def evaluate(args: Sequence[Any], params: Params, words: Any) -> tuple[list[Any], Taps]:
            with backward.with_words(words):
                outputs, taps = self._program(program, args, params)
            return varying_as([real(x) for x in outputs], [value.kind for value in program.outputs]), taps

        step = backward.current()
        words = None if step is None else step.words
        return in_automatic(evaluate, (list(args), dict(params), words), lambda found: self._specs(program, *found))

    def _specs(self, program: Program, _: list[Any], taps: Taps) -> Any:
        """How outputs and records are sharded; a record with the shape of its tensor is sharded like the tensor."""
        placed = {place.label: value for value, place in self.annotation.values.items()}
        placed |= {place.label: eqn.inputs[index] for (eqn, index), place in self.annotation.weights.items()}
        placed |= {joined.place.label: value for value, joined in self.annotation.joined.items()}

        def spec(label: str, x: Any) -> PartitionSpec:
            shape = placed[label].shape
            whole = x.shape[len(x.shape) - len(shape) :] == shape
            return PartitionSpec(*(None,) * (len(x.shape) - len(shape)), *placed[label].spec) if whole else WHOLE

        split = {label: jax.tree.map(lambda x: spec(label, x), tap) for label, tap in taps.items()}  # noqa: B023
        return [value.spec for value in program.outputs], split

    def _program(
        self, program: Program, args: Sequence[Any], params: Params, known: Known = MappingProxyType({})
    ) -> tuple[list[Any], Taps]:
        env: dict[Value, Any] = {}
        taps: Taps = {}
        forks = program.forks
        for value, arg in zip(program.inputs, args, strict=True):
            env[value] = self._observed(value, arg, params, taps)
        for position, eqn in enumerate(program.equations):
            inputs = [v.constant if v.constant is not None else env[v] for v in eqn.inputs]
            for index in range(len(inputs)):
                place = self.annotation.weights.get((eqn, index))
                if (eqn, index) in known:
                    inputs[index] = known[eqn, index]
                elif place is not None:
                    x = inputs[index]
                    inputs[index] = _placed(self._at(place, x, params, taps), eqn.inputs[index])
            with backward.numbered(position):
                if eqn.body is None:
                    outputs = self._equation(eqn, inputs)
                elif eqn.is_scan:
                    outputs = self._scan(eqn, eqn.body, inputs, params, taps, known)
                else:
                    outputs = self._remat(eqn, eqn.body, inputs, params, taps, known)
            for value, output in zip(eqn.outputs, outputs, strict=True):
                found = self._observed(value, _placed(output, value), params, taps)
                joined = self.annotation.joined.get(value)
                if joined is not None and self.joined and self.record is not None:
                    taps[joined.place.label] = self.record(joined.place, jnp.asarray(real(found)), None)
                env[value] = _once(found) if value in forks and isinstance(found, Quantized) else found
        return [v.constant if v.constant is not None else env[v] for v in program.outputs], taps

    def _equation(self, eqn: Equation, inputs: list[Any]) -> list[Any]:
        if not any(isinstance(x, Deferred) for x in inputs):
            return eqn.bind(*inputs)
        reading = self.annotation.ops.get(eqn)
        if reading is None:
            return eqn.bind(*(real(x) for x in inputs))
        op, mode = reading
        if mode == "permute" and isinstance(inputs[0], Pending):
            return [inputs[0].transposed(eqn.params["permutation"])]
        if mode == "permute":
            return eqn.bind(*(real(x) for x in inputs))
        if mode == "start":
            # The step expects an accumulator, but its input has codes.
            inputs = [Pending.of_real(x.real32(), x.dtype) if isinstance(x, Quantized) else x for x in inputs]
        outputs = shared_traces.training(op, eqn, inputs)
        target = self.annotation.target
        return outputs if target is None else with_bias_of(target, op, eqn, inputs, outputs)

    def _observed(self, value: Value, x: Any, params: Params, taps: Taps) -> Any:
        place = self.annotation.values.get(value)
        if place is None:
            return x
        # A bfloat16 model rounds here, between the accumulator and its quantizer, but the runtime does not.
        result = self._at(place, x, params, taps)
        # Operations without an integer form read this tensor as floats, in the model's own dtype.
        return dataclasses.replace(result, dtype=value.dtype) if isinstance(result, Quantized) else result

    def _at(self, place: Place, x: Any, params: Params, taps: Taps) -> Any:
        pending = x
        x = x.real32() if isinstance(x, Deferred) else jnp.asarray(x)
        quantized = None if self.quantize is None else self.quantize(place, _numbers_as(x, params[place.name]), x)
        if self.averages and isinstance(quantized, Quantized):
            quantized = self.averaged(place, pending, quantized)
        if self.record is not None:
            kept = self.record(place, x, quantized)
            if kept is not None:
                taps[place.label] = kept
        if isinstance(quantized, Quantized):
            # Without this, XLA fuses the quantization into every consumer and computes the codes once for each.
            return dataclasses.replace(quantized, codes=finished_on_cpu(quantized.codes))
        if quantized is not None:
            return quantized
        # Without this, XLA recomputes a residual stream in every block that reads it, and compiles all of that.
        return finished_on_cpu(x) if isinstance(x, Tracer) and self.record is not None else x

    def averaged(self, place: Place, x: Any, nearest: Quantized) -> Quantized:
        """The codes of an average as the target computes them; other tensors keep their codes."""
        target = self.annotation.target
        if target is None or not isinstance(x, Pending) or x.average is None:
            return nearest
        codes = x.average.codes(target, x.acc, nearest.codes, nearest.qparams, same_grid=place.on_input_grid)
        return dataclasses.replace(nearest, codes=codes)

    # ------------------------------------------------------------------ bodies

    def _remat(
        self, eqn: Equation, body: Program, inputs: list[Any], params: Params, taps: Taps, known: Known
    ) -> list[Any]:
        inner = {name: params[name] for name in self._names(body) if name in params}

        def run(inputs: list[Any], params: Params) -> tuple[list[Any], Taps]:
            with recomputed():
                return self._program(body, inputs, params, known)

        run = jax.checkpoint(run, prevent_cse=eqn.params.get("prevent_cse", True), policy=eqn.params.get("policy"))
        outputs, recorded = run(inputs, inner)
        taps.update(recorded)
        return outputs

    def _scan(
        self, eqn: Equation, body: Program, inputs: list[Any], params: Params, taps: Taps, known: Known
    ) -> list[Any]:
        fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        stacked: dict[str, Any] = {}
        timed = eqn in self.annotation.timed
        each: Params = {}
        if timed:
            each = self._elementwise(body, params)
            env = dict(zip(body.inputs[:fixed], inputs[:fixed], strict=True))
            known = {**known, **self._invariant(body, env, params, taps, known)}
        else:
            names = self._names(body)
            stacked = {name: params[name] for name in names if name in params and name not in self.shared}
        # Tensors with the same quantization parameters in every iteration enter and leave the scan as codes.
        grids = [
            x if isinstance(x, Quantized) and (index >= fixed + carried or value in self.annotation.grids) else None
            for index, (value, x) in enumerate(zip(body.inputs, inputs, strict=True))
        ]
        arrays = [real(x) if grid is None else grid.codes for grid, x in zip(grids, inputs, strict=True)]
        kinds = [value.kind for value in body.inputs[fixed : fixed + carried]]
        outer = {index: self._grid_of(value, params) for index, value in enumerate(eqn.outputs)}
        as_codes: set[int] = set()

        words = backward.words_of_iterations(eqn.params["length"])

        def step(carry: list[Any], xs: tuple[list[Any], Params, Any]) -> tuple[list[Any], tuple[list[Any], Taps]]:
            given: list[Any] = [*inputs[:fixed]]
            for value, grid, x in zip(body.inputs[fixed:], grids[fixed:], [*carry, *xs[0]], strict=True):
                given.append(x if grid is None else dataclasses.replace(grid.with_codes(x), dtype=value.dtype))
            with recomputed() if timed else contextlib.nullcontext(), backward.with_words(xs[2]):
                outputs, recorded = self._program(body, given, {**params, **each, **xs[1]}, known)
            for index, x in enumerate(outputs):
                grid = grids[fixed + index] if index < carried else outer[index]
                if grid is not None and isinstance(x, Quantized):
                    outputs[index] = x.codes.astype(grid.codes.dtype)
                    as_codes.add(index)
                else:
                    outputs[index] = real(x)
            return varying_as(outputs[:carried], kinds), (outputs[carried:], recorded)

        # Without this, the backward pass of a loop over time stores every array of every step, so they are recomputed
        # instead. Accelerators store the sums, because these cost more to compute than to store; the CPU recomputes
        # them too.
        policy = None if jax.default_backend() == "cpu" else jax.checkpoint_policies.save_only_these_names(ACCUMULATOR)
        body_step = jax.checkpoint(step, prevent_cse=False, policy=policy) if timed else step
        final, (stacks, recorded) = lax.scan(
            body_step,
            varying_as(arrays[fixed : fixed + carried], kinds),
            (arrays[fixed + carried :], stacked, words),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params.get("unroll", 1),
        )
        taps.update(recorded)
        results: list[Any] = [*final, *stacks]
        for index in as_codes:
            grid = grids[fixed + index] if index < carried else outer[index]
            assert grid is not None
            on_grid = grid.with_codes(results[index])
            results[index] = dataclasses.replace(on_grid, dtype=eqn.outputs[index].dtype)
        return results

    def _elementwise(self, body: Program, params: Params) -> Params:
        """Adds an "elementwise_scale" to the quantizers that the steps of a loop over time share.

        With it, the gradient of a scale is an array to which every step adds. Its elements (on several devices, those
        of all of them) are summed once, after the loop. This is possible only if one tensor of the step reads the
        scale.
        """
        counts = collections.Counter(place.name for place in self._places(body))
        found: dict[str, Any] = {}
        for value in (*body.inputs, *(output for eqn in body.equations for output in eqn.outputs)):
            place = self.annotation.values.get(value)
            own = params.get(place.name) if place is not None and counts[place.name] == 1 else None
            if place is not None and isinstance(own, dict) and "scale" in own and jnp.ndim(own["scale"]) == 0:
                found[place.name] = {**own, "elementwise_scale": jnp.broadcast_to(own["scale"], value.shape)}
        return found

    def _grid_of(self, value: Value, params: Params) -> Quantized | None:
        """The grid on which a scan stacks codes: that of a place inside, because its tensor cannot leave the scan."""
        place = self.annotation.grids.get(value)
        if place is None or self.quantize is None:
            return None
        found = self.quantize(place, params[place.name], jnp.zeros((1,) * len(value.shape), jnp.float32))
        return found if isinstance(found, Quantized) else None

    def _invariant(
        self, body: Program, env: dict[Value, Any], params: Params, taps: Taps, known: Known
    ) -> dict[tuple[Equation, int], Any]:
        """The weights of a body and of bodies inside that are computed from `env` alone; `env` grows on the way."""
        found: dict[tuple[Equation, int], Any] = {}
        constants = self.annotation.constants

        def get(value: Value) -> Any:
            return value.constant if value.constant is not None else env.get(value)

        for value in [value for value in env if value not in constants]:
            del env[value]
        for eqn in body.equations:
            inputs = [get(value) for value in eqn.inputs]
            for index, x in enumerate(inputs):
                if x is not None and (eqn, index) in self.annotation.invariant and (eqn, index) not in known:
                    found[eqn, index] = self._at(self.annotation.weights[eqn, index], x, params, taps)
            if all(x is not None for x in inputs):
                env.update(zip(eqn.outputs, eqn.bind(*inputs), strict=True))
            elif eqn.body is not None:
                entered = len(inputs) if eqn.primitive != "scan" else eqn.params["num_consts"]
                pairs = zip(eqn.body.inputs[:entered], inputs[:entered], strict=True)
                inner = {value: x for value, x in pairs if x is not None}
                found |= self._invariant(eqn.body, inner, params, taps, known)
                if eqn.primitive != "scan":
                    env.update({o: inner[i] for i, o in zip(eqn.body.outputs, eqn.outputs, strict=True) if i in inner})
        return found

    def _names(self, body: Program) -> list[str]:
        """The quantizers inside a body."""
        return list(dict.fromkeys(place.name for place in self._places(body)))

    def _places(self, body: Program) -> list[Place]:
        """The tensors with a quantizer inside a body."""
        found: list[Place] = []
        values = set(body.inputs)
        for eqn in body.walk():
            values.update(eqn.outputs)
            if eqn.body is not None:
                values.update(eqn.body.inputs)
            for index in range(len(eqn.inputs)):
                place = self.annotation.weights.get((eqn, index))
                if place is not None:
                    found.append(place)
        return [*found, *(place for value, place in self.annotation.values.items() if value in values)]


def _numbers_as(x: jax.Array, params: Any) -> Any:
    """A quantizer's numbers, varying between devices as its tensor does: their gradient is one sum over them."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(varying_alike(leaves, [x]))


def _placed(x: Any, value: Value) -> Any:
    """The accumulator or the codes of a tensor, split as explicit axes split it in the user's model."""
    if value.kind is None or not isinstance(x, Pending | Quantized):
        return x
    if isinstance(x, Pending):
        return dataclasses.replace(x, acc=placed_as(x.acc, value.kind))
    return dataclasses.replace(x, codes=placed_as(x.codes, value.kind))


def _once(x: Quantized) -> Quantized:
    """The same tensor, but the compiler must not recompute it for each reader (see `computed_once`)."""
    if not isinstance(x.codes, Tracer):
        return x
    # Always true (NaN included), but the compiler cannot prove it, so it keeps the branch.
    alive = x.scale.ravel()[0] != -1
    return dataclasses.replace(x, codes=computed_once_on_cpu(lax.stop_gradient(alive), x.codes))
