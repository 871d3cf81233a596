"""Finds weights that are unchanged parameters of the model, and reads and writes their codes.

The codes of such a weight follow from the weight and its quantizer alone. Methods that look at codes between two
training steps (how often a code changes, which are frozen) therefore need no forward pass. This does not hold for a
weight that the model computes from a parameter (transposed, normalised, cast), or that belongs to a scan. `weights_of`
lists these with the reasons.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.layers.frozen import FrozenParam
from qjax.model.call import Call
from qjax.model.quantized_model import Plan, QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.affine import broadcast_to_tensor, centered_bounds
from qjax.ops import Quantized
from qjax.support.batches import arguments_of
from qjax.support.names import did_you_mean
from qjax.training.scan_layers import Part, Stacks, part_of, quantizer_of, split


@dataclasses.dataclass(frozen=True)
class Weights:
    """The result of `weights_of`: hashable, so it can be a static argument.

    Attributes:
      names: quantizers whose tensor is an unchanged parameter of the model.
      left: (name, why) of all other weights.
    """

    names: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def weights_of(qmodel: QuantizedModel, sample: Any) -> Weights:
    """Find the quantized weights that are unchanged parameters.

    Args:
      qmodel: the quantized model.
      sample: one batch, an array or a tuple of the call's arguments; only its shapes matter.

    Examples:
      ```python
      print(qjax.training.weights_of(qmodel, x).names)
      ```
    """
    check_quantized(qmodel, "weights_of", numbers=False)
    # A trace in evaluation mode changes nothing, and the weights are the same in both modes.
    return unchanged(evaluation_copy(qmodel).trace(*arguments_of(sample, "weights_of", traced=True)), qmodel.plan)


def unchanged(call: Call, plan: Plan, *, repeated: bool = False) -> Weights:
    """Find the quantized weights of a call that are unchanged parameters, and the reasons why others are not.

    repeated: include those that every step of a recurrent layer, or a rematerialised part, reads.
    """
    traced, annotation = call.traced, call.annotation
    path_of = dict(zip(traced.program.inputs, traced.names, strict=True))
    for eqn in traced.program.walk() if repeated else ():
        if eqn.body is not None:
            # An equation comes before those of its body.
            entering = eqn.inputs[: eqn.params["num_consts"]] if eqn.is_scan else eqn.inputs
            inside = zip(eqn.body.inputs, entering, strict=False)
            path_of |= {value: path_of[outer] for value, outer in inside if outer in path_of}
    names: dict[str, None] = {}
    left: dict[str, str] = {}
    for (eqn, index), place in annotation.weights.items():
        if place.kind != "weight":
            continue
        quantizer = quantizer_of(plan.by_name, place.name)
        if place.stack:
            left[place.name] = "it is in a scan"
        elif place.name in plan.shared:
            left[place.name] = "the layers of a scan share its scale"
        elif path_of.get(eqn.inputs[index]) != place.name:
            left[place.name] = "the model computes it from a parameter, and no layer reads that parameter itself"
        elif quantizer.follows_tensor:
            left[place.name] = f'its scale follows it at every step (method "{quantizer.estimator.name}")'
        else:
            names[place.name] = None
    return Weights(tuple(name for name in names if name not in left), tuple(left.items()))


def parameters(qmodel: QuantizedModel, names: Iterable[str]) -> dict[str, nnx.Variable[Any] | Part]:
    """Name -> the variable itself, or one layer of a scan; writing to it changes the model.

    Raises:
      ValueError: a name is not a parameter of the model.
    """
    known = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(qmodel.model))}
    wanted = list(names)
    if frozen := [name for name in wanted if isinstance(known.get(split(name, known)[0]), FrozenParam)]:
        raise ValueError(
            f"Expected parameters in float, got {', '.join(map(repr, frozen))}, which freeze_base stored as codes. "
            "Call "
            "qjax.training.thaw_base(qmodel) first."
        )
    found = {name: part_of(known, qmodel.plan.by_name, name) for name in wanted}
    unknown = [name for name, variable in found.items() if variable is None]
    if unknown:
        raise ValueError(
            f"Expected names of parameters, got {', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], known)} "
            f"Take them from qjax.training.weights_of(qmodel, sample).names; the model has {', '.join(known)}."
        )
    return {name: variable for name, variable in found.items() if variable is not None}


def quantized_weights(qmodel: QuantizedModel, names: Iterable[str]) -> dict[str, Quantized]:
    """Name -> the weight on its grid, by the quantizer of the forward pass: centred codes in float32, and a scale."""
    values, by_name = Stacks(qmodel.quantizer_values()), qmodel.plan.by_name
    return {name: quantizer_of(by_name, name)(values[name], p[...]) for name, p in parameters(qmodel, names).items()}


def codes_of(qmodel: QuantizedModel, names: Iterable[str]) -> dict[str, jax.Array]:
    """Name -> the weight's present codes, int32 in the weight's shape, without the zero point: `weight = code * scale`.

    This works under `jit`. NaN becomes 0.

    Args:
      qmodel: the quantized model.
      names: of weights, as in `weights_of`.

    Examples:
      ```python
      codes = qjax.training.codes_of(qmodel, ["layers/0/kernel"])
      print(codes["layers/0/kernel"])
      ```
    """
    found = quantized_weights(qmodel, names)
    return {name: jnp.nan_to_num(q.codes).astype(jnp.int32) for name, q in found.items()}


def code_bounds(grid: Quantized) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest code of every weight, without the zero point: float32 in the weight's shape."""
    spec, shape = grid.qparams.spec, grid.codes.shape
    zero_point = broadcast_to_tensor(grid.qparams.integer_zero_point(), spec, shape)
    low, high = centered_bounds(zero_point, spec.qmin, spec.qmax)
    return jnp.broadcast_to(low, shape), jnp.broadcast_to(high, shape)


def set_codes(qmodel: QuantizedModel, codes: Mapping[str, Any]) -> None:
    """Set weights to these codes: each weight becomes `code * scale` under its present scale.

    The forward pass, `convert` and everything else then find exactly these codes, because `code * scale / scale` is
    less than 0.01 from the code in float32, for 16 bits too. Inside `jit`, where codes cannot be checked, the forward
    clips those that lie beyond the grid.

    Args:
      qmodel: the quantized model; the named weights are changed.
      codes: name -> integers of the weight's shape, without the zero point, as from `codes_of`.

    Raises:
      ValueError: a name is not a parameter; a shape differs; codes lie beyond the grid; a scale follows its weight.

    Examples:
      ```python
      codes = qjax.training.codes_of(qmodel, ["layers/0/kernel"])
      qjax.training.set_codes(
          qmodel, {name: jnp.clip(code, -3, 3) for name, code in codes.items()}
      )
      ```
    """
    values = Stacks(qmodel.quantizer_values())
    for name, parameter in parameters(qmodel, codes).items():
        quantizer, shape = quantizer_of(qmodel.plan.by_name, name), parameter[...].shape
        if jnp.shape(codes[name]) != shape:
            raise ValueError(f"set_codes: {name!r}: expected codes of shape {shape}, got {jnp.shape(codes[name])}.")
        if quantizer.follows_tensor:
            raise ValueError(
                f"set_codes: {name!r} has a scale that follows the weight, so it would not keep these codes. Quantize "
                'with weight_method="lsq" or "static".'
            )
        grid = quantizer(values[name], parameter[...])
        low, high = code_bounds(grid)
        if not any(isinstance(value, Tracer) for value in (codes[name], low, high)):
            beyond = np.logical_or(
                np.asarray(codes[name]) < np.asarray(low), np.asarray(codes[name]) > np.asarray(high)
            )
            if beyond.any():
                raise ValueError(
                    f"set_codes: {name!r}: {int(beyond.sum())} codes lie beyond the grid of {quantizer.spec}, such as "
                    f"{np.asarray(codes[name])[beyond][0]}. Codes are without the zero point, as from codes_of."
                )
        held = dataclasses.replace(grid, codes=jnp.asarray(codes[name]).astype(jnp.float32))
        parameter[...] = held.real32().astype(parameter[...].dtype)
