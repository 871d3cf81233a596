"""ExecuTorch with its XNNPACK delegate, on models of one operation in the form that its quantizer makes.

ExecuTorch runs in a process of its own, beside PyTorch, which writes the models. A model takes and returns floats; they
lie on the grids of the case, so quantizing them is exact.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import Case, Grid, float_bias, output_shape, padding, strides, window
from conformance.runtimes.process import Process

_WORKER = Path(__file__).with_name("executorch_worker.py")
_CHANNELS = {1: 2, 2: 3, 3: 1}
"""The axes of an image as NHWC -> as NCHW."""


@dataclasses.dataclass(frozen=True)
class ExecuTorch:
    """The delegate that `XnnpackPartitioner` makes, on one thread."""

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return "executorch"

    def version(self) -> str:
        """The packages and their versions."""
        return _process().greeting

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case.

        Raises:
          ImportError: there is no ExecuTorch.
          ValueError: a case that it does not compute; a bias that no float bias holds, see `held`.
        """
        return _process().ask(_request(case), case.op)["codes"].reshape(output_shape(case))

    def left_out(self, case: Case) -> list[str]:
        """The operators of the case's model that the delegate leaves to other kernels."""
        return _process().ask(_request(case), case.op)["left"]


def held(case: Case) -> Case:
    """The case with the bias that ExecuTorch stores: it quantizes a float bias, which has 24 bits."""
    if case.bias is None or case.kernel_grid is None:
        return case
    return dataclasses.replace(case, bias=_stored(case, np.broadcast_to(float_bias(case), case.bias.shape)))


def _stored(case: Case, bias: np.ndarray) -> np.ndarray:
    """ExecuTorch multiplies by the reciprocal of s_x * s_w: in float32 with a scale per channel, in double without."""
    assert case.kernel_grid is not None
    s_x, s_w = np.float32(case.grids[0].scale), np.asarray(case.kernel_grid.scale, np.float32)
    share = np.float32(1) / (s_w * s_x) if s_w.ndim else np.float32(1 / (float(s_w) * float(s_x)))
    codes = np.rint(bias * share).astype(np.float64)
    return np.clip(codes, -(2**31), 2**31 - 1).astype(np.int64).astype(np.int32)


def _float_bias(case: Case) -> np.ndarray:
    """A float bias that ExecuTorch stores as the case's: the nearest number, or one of its neighbours.

    Raises:
      ValueError: there is none.
    """
    assert case.bias is not None
    nearest = np.array(np.broadcast_to(float_bias(case), case.bias.shape))
    bias = nearest
    for direction in (np.float32(np.inf), np.float32(-np.inf)):
        tried = nearest
        for _ in range(4):
            tried = np.nextafter(tried, direction)
            bias = np.where(_stored(case, bias) == case.bias, bias, tried)
    if not np.array_equal(_stored(case, bias), case.bias):
        raise ValueError("ExecuTorch's biases are floats, and no float has these codes; take the case of `held`.")
    return bias


@functools.cache
def _process() -> Process:
    return Process(
        "ExecuTorch",
        [sys.executable],
        _WORKER,
        lambda reason: ModuleNotFoundError(
            f"ExecuTorch needs the packages executorch and torch: make venv-oracles, or pip install executorch "
            f"torch==2.13.0. Here {reason}."
        ),
    )


def _request(case: Case) -> dict[str, Any]:
    grids = (*case.grids, case.output)
    if any(grid.dtype != "int8" for grid in grids):
        raise ValueError(f"ExecuTorch's {case.op} takes int8 codes, got {', '.join(grid.dtype for grid in grids)}.")
    request: dict[str, Any] = {
        "op": case.op,
        "inputs": case.inputs,
        "grids": [_grid(grid) for grid in case.grids] or [None],
        "output": _grid(case.output),
    }
    if case.kernel is not None:
        assert case.kernel_grid is not None
        axes = (1, 0) if case.op == "fully_connected" else (3, 2, 0, 1)
        request["kernel"] = case.kernel.transpose(axes)
        request["kernel_scale"] = np.asarray(case.kernel_grid.scale, np.float32)
        request["bias"], request["float_bias"] = case.bias, _float_bias(case)
    if case.op in ("conv2d", "depthwise_conv2d", "average_pool"):
        request.update(_window(case))
    if case.op == "mean":
        image = case.inputs[0].ndim == 4
        request["axes"] = [_CHANNELS[axis] if image else axis for axis in case.attributes["axes"]]
    return request


def _window(case: Case) -> dict[str, Any]:
    """Padding that differs from side to side is made of codes beforehand."""
    pads = padding(case)
    found: dict[str, Any] = {"window": list(window(case)), "strides": list(strides(case)), "padding": [0, 0]}
    if case.kernel is not None:
        found["groups"] = case.inputs[0].shape[3] // case.kernel.shape[2]
    if all(low == high for low, high in pads):
        found["padding"] = [low for low, _ in pads]
    elif case.op == "average_pool":
        raise ValueError(f"ExecuTorch's average_pool takes padding alike on both sides, got {pads}.")
    else:
        around = [(0, 0), *((low, high) for low, high in pads), (0, 0)]
        found["inputs"] = (np.pad(case.inputs[0], around, constant_values=case.grids[0].zero_point),)
    return found


def _grid(grid: Grid) -> tuple[np.float32, int]:
    return np.float32(grid.scale), grid.zero_point
