"""Merges low-rank adapters into their weights, which is the form in which a fine-tuned model ships."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.api.calibrate import calibrate_weights
from qjax.layers import Traced, trace
from qjax.layers.frozen import frozen_parameters
from qjax.model.fingerprint import fingerprint
from qjax.model.quantized_model import Plan, QuantizedModel, check_quantized, evaluation_copy
from qjax.model.quantizer_numbers import QuantizerNumbers
from qjax.ops.frozen import Move, moved_back
from qjax.support.batches import arguments_of
from qjax.tracing import Adapter, Program, Value, adapter_of, joined, uses_of_parameter
from qjax.training.frozen import thaw_base

_Matrices = dict[Adapter, dict[tuple[int, ...], jax.Array]]
"""Adapter -> iteration of the scans around it -> the matrix that it adds to its weight."""


def merge_adapters(qmodel: QuantizedModel, sample: Any) -> QuantizedModel:
    """Return a copy of a quantized model whose weights include their low-rank adapters.

    The adapters of the copy are zeros and take no part in its forward pass, so `convert` finds one product where there
    were three. A frozen base becomes floats again, with the values of its codes.

    With `Recipe(adapters="within")` the merged weights have the codes with which the model trained, because its scales
    do not change. With "beside" they get new scales and new codes, so measure the merged model.

    Args:
      qmodel: the model with adapters; it is not changed.
      sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.

    Raises:
      ValueError: an adapter does not lie beside a product, or a weight is also read without its adapter.

    Examples:
      ```python
      class Adapted(nnx.Module):
          def __init__(self, rngs):
              self.base = nnx.Linear(8, 4, rngs=rngs)
              self.adapter = nnx.LoRA(8, 2, 4, rngs=rngs)

          def __call__(self, x):
              return self.base(x) + self.adapter(x)


      qmodel = qjax.quantize(Adapted(nnx.Rngs(0)), recipe, x)
      merged = qjax.training.merge_adapters(qmodel, x)
      ```
    """
    check_quantized(qmodel, "merge_adapters")
    args = arguments_of(sample, "merge_adapters")
    merged, plan = nnx.clone(qmodel), qmodel.plan
    if any(True for _ in frozen_parameters(merged)):
        thaw_base(merged)
    raw = trace(evaluation_copy(merged).model, args, {}, plan.expected)
    _check_merged(raw, plan)
    traced, _ = dataclasses.replace(plan, adapters="within").read(raw)
    matrices: _Matrices = {}
    for adapter, step, matrix in _matrices(traced.program, dict(zip(traced.program.inputs, traced.args, strict=True))):
        matrices.setdefault(adapter, {})[step] = matrix
    changed = _add(merged, traced, matrices)
    for _, variable in nnx.to_flat_state(nnx.state(merged.model, nnx.LoRAParam)):
        variable[...] = jnp.zeros_like(variable[...])
    states = _carry_numbers(merged, raw, plan)
    merged.plan = dataclasses.replace(plan, adapters="merged", **states.pop("plan"))
    merged.quantizers = QuantizerNumbers(merged.plan.by_name, states.pop("quantizers"))
    merged.fingerprint = fingerprint(merged.plan.by_name)
    if plan.adapters == "beside":
        calibrate_weights(merged, args, lambda name: name.partition("#")[0] in changed)
    return merged


def _check_merged(raw: Traced, plan: Plan) -> None:
    """Raise where an adapter could not be merged, or the model has none."""
    merged, _ = dataclasses.replace(plan, adapters="merged").read(raw)
    names = dict(zip(raw.program.inputs, raw.names, strict=True))
    # Going backwards, an equation that only reads dropped values is dropped as well.
    read = set(merged.results.outputs)
    for eqn in reversed(merged.program.equations):
        if eqn.body is not None or any(value in read for value in eqn.outputs):
            read.update(eqn.inputs)
    left = sorted(names[value] for value in raw.adapters if value in read and _is_read(merged.program, value))
    if not raw.adapters or left:
        problem = f"cannot merge {', '.join(left)}" if left else "the model has no adapters (nnx.LoRAParam)"
        raise ValueError(
            f"merge_adapters: {problem}. Expected adapters that add a product of a layer's own input, without a "
            "dropout or a function in between, to that layer's result, as nnx.LoRA and nnx.LoRALinear do."
        )


def _is_read(program: Program, value: Value) -> bool:
    """Whether an equation that computes reads a parameter."""
    return any(not all(eqn.fixed) for eqn, *_ in uses_of_parameter(program, value))


def _matrices(
    program: Program, env: dict[Value, Any], step: tuple[int, ...] = ()
) -> Iterator[tuple[Adapter, tuple[int, ...], jax.Array]]:
    """The matrices that the adapters of a program add to their weights. env: the values known so far."""
    for eqn in program.equations:
        known = [v.constant if v.constant is not None else env.get(v) for v in eqn.inputs]
        adapter = adapter_of(eqn)
        if eqn.body is not None:
            scan = eqn.is_scan
            fixed, carried = (eqn.params["num_consts"], eqn.params["num_carry"]) if scan else (len(known), 0)
            for index in range(eqn.params["length"] if scan else 1):
                inner = {own: x for own, x in zip(eqn.body.inputs[:fixed], known, strict=False) if x is not None}
                slices = zip(eqn.body.inputs[fixed + carried :], known[fixed + carried :], strict=True)
                inner |= {own: x[index] for own, x in slices if x is not None and own.fixed}
                yield from _matrices(eqn.body, inner, (*step, index) if scan else step)
        elif adapter is not None:
            yield adapter, step, adapter.matrix(*(x for x in known[1:] if x is not None))
        elif all(eqn.fixed) and all(x is not None for x in known):
            env.update(zip(eqn.outputs, eqn.bind(*known), strict=True))


def _add(model: QuantizedModel, traced: Traced, matrices: _Matrices) -> set[str]:
    """Add the matrices to the parameters; returns the names of the parameters that changed."""
    variables = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model.model))}
    changed: set[str] = set()
    for value, name in zip(traced.program.inputs, traced.names, strict=True):
        uses = list(uses_of_parameter(traced.program, value, through=False))
        own = [(adapter_of(eqn), moves, depth) for eqn, index, moves, depth in uses if index == 0]
        found = [(adapter, moves, depth) for adapter, moves, depth in own if adapter is not None]
        if not found or name not in variables:
            continue
        if len(found) < len(uses) or len({(moves, depth) for _, moves, depth in found}) > 1:
            raise ValueError(
                f"merge_adapters: {name!r} is also read without its adapter, so it cannot include it. Expected a "
                "weight that only the layer with the adapter reads."
            )
        variable = variables[name]
        adapter, moves, depth = found[0]
        whole = variable[...]
        added = _stack_steps(matrices[adapter], moves, whole.shape, depth)
        variable[...] = (whole.astype(jnp.float32) + added).astype(whole.dtype)
        changed.add(name)
    return changed


def _stack_steps(
    steps: Mapping[tuple[int, ...], jax.Array], moves: tuple[Move, ...], shape: tuple[int, ...], depth: int
) -> jax.Array:
    parts = {step: moved_back(matrix, moves, shape[depth:]).astype(jnp.float32) for step, matrix in steps.items()}
    if not depth:
        return parts[next(iter(parts))]
    return jnp.stack([parts[step] for step in np.ndindex(*shape[:depth])]).reshape(shape)


def _carry_numbers(model: QuantizedModel, raw: Traced, plan: Plan) -> dict[str, Any]:
    """The quantizers of the merged model, each with the numbers that its tensor had before the merge."""
    _, old = plan.read(raw)
    _, new = dataclasses.replace(plan, adapters="merged").read(raw)
    ends = {whole: join for join, whole in joined(raw.program, raw.adapters).items()}
    sources: dict[str, str] = {}
    for value, place in new.values.items():
        earlier = old.values.get(ends.get(value, value)) or old.values.get(value)
        if earlier is not None:
            sources.setdefault(place.name, earlier.name)
    for place in new.weights.values():
        if place.name in plan.by_name:
            sources.setdefault(place.name, place.name)
    missing = [name for name in new.places() if name not in sources]
    if missing:
        raise ValueError(
            f"merge_adapters: the merged model has tensors that were not quantized before: {', '.join(missing)}. "
            'Quantize the model with qjax.Recipe(adapters="within").'
        )
    details, observers = dict(plan.details), dict(plan.observers)
    chosen = {name: sources[name] for name in new.places()}
    fields = {
        "quantizers": tuple((name, plan.by_name[source]) for name, source in chosen.items()),
        "details": tuple((name, details[source]) for name, source in chosen.items()),
        "observers": tuple((name, observers[source]) for name, source in chosen.items()),
        "shared": frozenset(name for name, source in chosen.items() if source in plan.shared),
    }
    known = model.quantizers.named()
    values = {name: known[source] for name, source in chosen.items()}
    return {"plan": fields, "quantizers": values}
