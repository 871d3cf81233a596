"""The formulas by which runtimes compute operations without weights, one file per formula or family."""

from typing import Any

import numpy as np
from jax.core import Tracer

from qjax.numerics.rules import get_rule, rule_names
from qjax.ops.formulas import executorch_rescale as executorch_rescale
from qjax.ops.formulas import onnx_add as onnx_add
from qjax.ops.formulas import onnx_average as onnx_average
from qjax.ops.formulas import onnx_float as onnx_float
from qjax.ops.formulas import onnx_multiply as onnx_multiply
from qjax.ops.formulas import openvino_add as openvino_add
from qjax.ops.formulas import tflite_add as tflite_add
from qjax.ops.formulas import tflite_average_pool as tflite_average_pool
from qjax.ops.formulas import tflite_matmul as tflite_matmul
from qjax.ops.formulas import tflite_mean as tflite_mean
from qjax.ops.formulas import tflite_multiply as tflite_multiply
from qjax.ops.formulas import tflite_rescale as tflite_rescale
from qjax.ops.formulas import torch_add as torch_add
from qjax.ops.formulas import torch_average as torch_average
from qjax.ops.formulas import torch_multiply as torch_multiply
from qjax.ops.formulas import torch_qnnpack_add as torch_qnnpack_add
from qjax.ops.formulas import torch_rescale as torch_rescale
from qjax.ops.formulas import tosa as tosa
from qjax.ops.formulas import xnnpack_add as xnnpack_add
from qjax.ops.formulas import xnnpack_mean as xnnpack_mean
from qjax.ops.formulas import xnnpack_mean_arm as xnnpack_mean_arm
from qjax.ops.formulas import xnnpack_multiply as xnnpack_multiply
from qjax.ops.formulas import xnnpack_multiply_arm as xnnpack_multiply_arm
from qjax.ops.formulas import xnnpack_rescale as xnnpack_rescale
from qjax.ops.formulas.base import OPS, Formula, Setting, register, registered
from qjax.ops.formulas.requantized import requantized
from qjax.targets import Target

__all__ = ["OPS", "Formula", "Setting", "average", "check_target", "count_of", "get", "names", "register"]


def get(name: str) -> Formula:
    """The formula with that name: a registered one, or a rule of requantization ("single_round", "float32/f32")."""
    found = registered().get(name)
    if found is not None:
        return found
    rule, slash, form = name.partition("/")
    if _is_rule(rule) and form in ("", "f64", "f32") and bool(slash) == bool(form):
        return requantized(rule, "f32" if form == "f32" else "f64")
    raise ValueError(
        f"Unknown formula {name!r}. Known formulas: {', '.join(names())}; and every rule of requantization: "
        f"{', '.join(rule_names())}, also as rule/f32."
    )


def average(
    target: Target, op: str, *, spatial: bool, wide: bool, same_grid: bool, varying: bool = False
) -> Formula | None:
    """The formula by which a target computes an average, or None for the exact sum.

    Args:
      op: "mean" or "average_pool".
      spatial: whether a mean runs over height and width of an NHWC tensor.
      wide: whether the codes have 16 bits.
      same_grid: whether the output has the input's scale and zero point.
      varying: whether the outputs average different numbers of elements.
    """
    name = target.formula(op)
    if name is None:
        return None
    formula = get(name)
    if op == "mean" and formula.elsewhere is not None and not spatial:
        formula = get(formula.elsewhere)
    if formula.same_grid and not same_grid:
        if op == "mean" or varying:
            return None
        # an average with other output quantization parameters is a depthwise convolution with weights of 1
        weighted = target.weighted("depthwise", wide=wide)
        return get(f"{weighted.rule}/{weighted.scale}")
    return formula


def count_of(step: str, value: Any) -> int | np.ndarray | None:
    """The number by which a step divides a sum: "div" by whole numbers, or "mul" by their reciprocals.

    Returns None for any other step, and for numbers that are tracers.
    """
    if step not in ("div", "mul") or isinstance(value, Tracer):
        return None
    number = np.asarray(value).astype(np.float64)
    with np.errstate(divide="ignore"):
        count = np.rint(number if step == "div" else 1 / number)
        exact = count if step == "div" else (1 / count)
    if not (np.all(count >= 1) and np.all(count < 2**31) and np.array_equal(exact.astype(np.float32), value)):
        return None
    return int(count) if count.ndim == 0 else count.astype(np.int32)


def check_target(target: Target) -> None:
    """Raise a ValueError unless every formula that a target names exists and computes its operation."""
    for op in OPS:
        name = target.formula(op)
        if name is None:
            continue
        try:
            formula = get(name)
        except ValueError as error:
            raise ValueError(f"Target {target.name!r}, {op}: {error}") from None
        if op not in formula.ops:
            raise ValueError(
                f"Target {target.name!r}, {op}: the formula {name!r} only computes {', '.join(sorted(formula.ops))}."
            )
    if target.scaled_matmul and (target.matmul is None or not get(target.matmul).factors):
        raise ValueError(
            f"Target {target.name!r}: scaled_matmul needs a matmul formula that takes a factor, such as a rule of "
            f"requantization. Got {target.matmul!r}."
        )


def _is_rule(name: str) -> bool:
    try:
        return not get_rule(name).needs_key
    except ValueError:
        return False


def names() -> tuple[str, ...]:
    """The registered formulas, without the rules of requantization."""
    return tuple(sorted(registered()))
