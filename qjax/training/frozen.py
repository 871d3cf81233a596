"""Freezes weights as codes, so that adapters train on top of a quantized base, as in QLoRA."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.layers.frozen import FrozenParam, frozen_parameters
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.affine import quantize
from qjax.ops.frozen import Frozen, Use, moved
from qjax.support import markup
from qjax.support.batches import arguments_of
from qjax.tracing import Annotation, Equation, lookup_of, product_of, use_of, uses_of_parameter, weight_of

_Parts = Callable[[jax.Array, tuple[int, ...]], list[jax.Array]]
"""(a weight as its product reads it, the iteration of the scans around it) -> codes, scales and further arrays."""


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    """The result of `freeze_base`.

    Args:
      names: the parameters that are stored as codes now.
      left: (name, why) of the weights that are not.
      before, after: bytes of all arrays of the model.
    """

    names: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    before: int
    after: int

    def __str__(self) -> str:
        lines = [f"{len(self.names)} weights are codes: {self.before:,} bytes before, {self.after:,} after"]
        return "\n".join([*lines, *(f"left in float: {name}, because {why}" for name, why in self.left)])

    def _repr_html_(self) -> str:
        return markup.table(("left in float", "why"), self.left, str(self).splitlines()[0])


def freeze_base(qmodel: QuantizedModel, sample: Any, *, train: Any = nnx.LoRAParam) -> FrozenBase:
    """Store the weights of a quantized model as packed codes, in place; those that `train` selects stay floats.

    A weight is frozen if only products with one quantizer read it. The frozen model computes the same bits as before,
    but its codes no longer train. `nnx.state(qmodel, nnx.Param)` holds the rest: adapters, biases, norms.

        qjax.training.freeze_base(qmodel, sample)
        optimizer = nnx.Optimizer(qmodel, optax.adam(1e-3), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(qmodel)
        optimizer.update(qmodel, grads)

    Args:
      qmodel: the model; its base becomes codes.
      sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.
      train: an nnx filter of the parameters that train.

    Raises:
      ValueError: no weight can be frozen.

    Examples:
      ```python
      class Adapted(nnx.Module):
          def __init__(self, rngs):
              self.base = nnx.Linear(8, 4, rngs=rngs)
              self.adapter = nnx.LoRA(8, 2, 4, rngs=rngs)

          def __call__(self, x):
              return self.base(x) + self.adapter(x)


      qmodel = qjax.quantize(Adapted(nnx.Rngs(0)), recipe, x)
      print(qjax.training.freeze_base(qmodel, x))
      ```
    """
    return freeze_weights(qmodel, sample, train=train)


def freeze_weights(
    qmodel: QuantizedModel,
    sample: Any,
    *,
    train: Any,
    lookups: bool = False,
    stored: Callable[[str, Frozen], tuple[jax.Array, ...] | None] = lambda name, frozen: None,
) -> FrozenBase:
    """`freeze_base` for weights whose codes are known already.

    lookups: whether rows that are looked up in float may become those that their codes represent. stored: the arrays of
    `Frozen.packed` of a parameter, with the axes of scans in front; None: they are computed from its floats.
    """
    check_quantized(qmodel, "freeze_base")
    call = evaluation_copy(qmodel).trace(*arguments_of(sample, "freeze_base"))
    traced, annotation = call.traced, call.annotation
    before = _bytes(qmodel)
    variables = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(qmodel.model, nnx.Param))}
    trains = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(qmodel.model, train))}
    names: list[str] = []
    left: list[tuple[str, str]] = []
    found: dict[int, FrozenParam] = {}
    for value, name in zip(traced.program.inputs, traced.names, strict=True):
        if name not in variables or name in trains:
            continue
        uses = list(uses_of_parameter(traced.program, value))
        if not any(_is_weight(annotation, eqn, index) for eqn, index, _, _ in uses):
            continue
        read = [use for use in uses if not (lookups and _is_float_lookup(qmodel, annotation, use))]
        why, use, depth, parts = _one_use(qmodel, annotation, read)
        if use is not None and len(read) < len(uses) and not _has_rows(use, variables[name], depth):
            why, use = "rows of it are looked up that cannot be unpacked one by one", None
        if use is None:
            left.append((name, why))
            continue
        variable = variables[name]
        whole = variable[...]
        frozen = Frozen(use, whole.shape[depth:], str(whole.dtype), whole.shape[:depth])
        found[id(variable)] = FrozenParam.of(variable, frozen, stored(name, frozen) or _pack(frozen, whole, parts))
        names.append(name)
    if not names:
        reasons = "; ".join(f"{name}: {why}" for name, why in left) or "the call reads no quantized weight but adapters"
        raise ValueError(f"freeze_base: no weight can be frozen. {reasons}.")
    replace_variables(qmodel, lambda variable: found.get(id(variable)))
    return FrozenBase(tuple(names), tuple(left), before, _bytes(qmodel))


def thaw_base(qmodel: QuantizedModel) -> None:
    """Undo `freeze_base`, in place: weights are floats again, with the values of their codes.

    Args:
      qmodel: a model with a frozen base; any other model does not change.

    Examples:
      ```python
      qjax.training.freeze_base(qmodel, x, train=())
      qjax.training.thaw_base(qmodel)  # floats again, with the values of their codes
      ```
    """
    check_quantized(qmodel, "thaw_base")
    known = {id(parameter): parameter for _, _, parameter in frozen_parameters(qmodel)}
    floats = {key: parameter.thawed() for key, parameter in known.items()}
    replace_variables(qmodel, lambda variable: floats.get(id(variable)))


def _one_use(qmodel: QuantizedModel, annotation: Annotation, uses: list[Any]) -> tuple[str, Use | None, int, Any]:
    """How all readers use a parameter: (why they disagree, the use, scans around it, what computes its codes)."""
    found: dict[tuple[Use, int], _Parts] = {}
    for eqn, index, moves, depth in uses:
        place, product = annotation.weights.get((eqn, index)), weight_of(eqn)
        if product is not None:
            found[use_of(product, moves), depth] = _of_product(product, eqn.inputs[index].dtype)
        elif product_of(eqn) is not None:
            continue  # the operand is only there for its gradient
        elif place is None or place.kind != "weight":
            return f"{eqn.primitive!r} reads it as floats ({eqn.where})", None, 0, None
        elif qmodel.plan.by_name[place.name].follows_tensor:
            return "its scale follows it at every step", None, 0, None
        else:
            spec = qmodel.plan.by_name[place.name].spec
            use = Use(spec, moves, tuple(eqn.in_shapes[index]), ())
            found[use, depth] = _of_quantizer(qmodel, place.name, eqn.inputs[index].dtype)
    if len(found) > 1:
        return "the model reads it in several forms", None, 0, None
    ((use, depth), parts) = next(iter(found.items()))
    return "", use, depth, parts


def _is_float_lookup(qmodel: QuantizedModel, annotation: Annotation, use: Any) -> bool:
    eqn, index, moves, depth = use
    place = annotation.weights.get((eqn, index))
    return (
        lookup_of(eqn) and index == 1 and not moves and not depth and place is None and qmodel.plan.is_float(eqn.scope)
    )


def _has_rows(use: Use, variable: Any, depth: int) -> bool:
    shape = tuple(variable.shape)
    return Frozen(use, shape[depth:], str(variable.dtype), shape[:depth]).has_rows


def _is_weight(annotation: Annotation, eqn: Equation, index: int) -> bool:
    place = annotation.weights.get((eqn, index))
    return weight_of(eqn) is not None or (place is not None and place.kind == "weight")


def _of_product(product: Any, dtype: Any) -> _Parts:
    return lambda w, step: product.stored_parts(w.astype(dtype))


def _of_quantizer(qmodel: QuantizedModel, name: str, dtype: Any) -> _Parts:
    quantizer, values = qmodel.plan.by_name[name], qmodel.quantizer_values()[name]

    def parts(w: jax.Array, step: tuple[int, ...]) -> list[jax.Array]:
        own = {key: value[step] for key, value in values.items()} if quantizer.stack else values
        qparams = quantizer.qparams(own)
        return [quantize(w.astype(dtype), qparams), qparams.scale, qparams.integer_zero_point()]

    return parts


def _pack(frozen: Frozen, whole: jax.Array, parts: _Parts) -> tuple[jax.Array, ...]:
    """The codes of a parameter, computed for one iteration of the scans at a time, so that only one is in float."""
    steps = list(np.ndindex(*frozen.stack))
    rows = [frozen.packed(parts(moved(whole[step], frozen.use.moves), step)) for step in steps]
    if not frozen.stack:
        return tuple(rows[0])
    return tuple(jnp.stack(arrays).reshape(*frozen.stack, *arrays[0].shape) for arrays in zip(*rows, strict=True))


def replace_variables(qmodel: QuantizedModel, by: Callable[[Any], Any]) -> None:
    """Replace the variables of a model, in place. by: a variable -> the new one, None for none."""
    for _, owner in list(nnx.iter_graph(qmodel)):
        if isinstance(owner, nnx.Variable):
            continue
        for name, value in tuple(getattr(owner, "__dict__", {}).items()):
            new = by(value) if isinstance(value, nnx.Variable) else None
            if new is not None:
                setattr(owner, name, new)


def _bytes(model: nnx.Module) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model)))
