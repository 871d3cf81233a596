"""PyTorch's quantized operators on the CPU: engines fbgemm, x86, qnnpack and onednn.

PyTorch runs in a process of its own, on one thread: it reads once, at its start, which instructions it may use, and
QJAX_TORCH_PYTHON may name the Python that has it (the one that runs qjax is tried first).
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from conformance.case import Case, Grid, float_bias, output_shape, padding, strides, window
from conformance.runtimes.process import Process

Engine = Literal["fbgemm", "x86", "qnnpack", "onednn"]
Instructions = Literal["avx2", "native"]

PYTHON = "QJAX_TORCH_PYTHON"
"""The environment variable that names another Python to run PyTorch in."""

_WORKER = Path(__file__).with_name("torch_worker.py")
_AVX2 = {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_WEIGHTED = ("fully_connected", "conv2d", "depthwise_conv2d")


@dataclasses.dataclass(frozen=True)
class TorchCpu:
    """One engine of PyTorch.

    engine: torch.backends.quantized.engine. "x86" does what "fbgemm" does, with one exception: on a CPU with AVX-512
      VNNI it computes convolutions of up to 100 groups as "onednn" does, also under `instructions="avx2"`.
    instructions: "avx2" holds FBGEMM, oneDNN and ATen to AVX2, so that every machine gives the same codes: products of
      uint8 and int8 then saturate to int16 in pairs. "native" takes what the machine has; with VNNI they are exact.
    channels_last: the layout of images, which decides how averages round; a mean over height and width is then
      adaptive_avg_pool2d(1), otherwise torch.mean. Quantized convolutions return channels last.

    "quantize" is quantize_per_tensor, or what attributes["function"] says: "quantize_per_channel" (with equal scales)
    or "fake_quantize".

    A case's bias becomes float32(bias * (s_x * s_w)), the product in doubles: PyTorch's biases are floats.
    """

    engine: Engine = "fbgemm"
    instructions: Instructions = "avx2"
    channels_last: bool = True

    def __post_init__(self) -> None:
        for field, literal in (("engine", Engine), ("instructions", Instructions)):
            if getattr(self, field) not in get_args(literal):
                raise ValueError(
                    f"{field} must be one of {', '.join(get_args(literal))}. Got {getattr(self, field)!r}."
                )

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        parts = ["torch", self.engine]
        flags = {"native": self.instructions == "native", "contiguous": not self.channels_last}
        return "-".join(parts + [name for name, present in flags.items() if present])

    def version(self) -> str:
        """The package and its version."""
        return f"torch {_worker(self.instructions).greeting}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case.

        Raises:
          ImportError: there is no PyTorch.
          ValueError: a case that this engine does not compute.
        """
        return _worker(self.instructions).ask(_request(self, case), case.op).reshape(output_shape(case))


@functools.cache
def _worker(instructions: Instructions) -> Process:
    if importlib.util.find_spec("torch") is not None:
        python = sys.executable
    elif PYTHON in os.environ:
        python = os.environ[PYTHON]
    else:
        raise _missing(f"{sys.executable} has none and {PYTHON} names no other Python")
    return Process("PyTorch", [python], _WORKER, _missing, _AVX2 if instructions == "avx2" else None)


def _missing(why: str) -> ImportError:
    return ImportError(
        f"PyTorch's operators need the package torch, but {why}: make venv-oracles, or pip install torch==2.13.0"
    )


def _request(runtime: TorchCpu, case: Case) -> dict[str, Any]:
    if case.op in _WEIGHTED:
        _expect(all(grid.dtype == "uint8" for grid in (*case.grids, case.output)), case, "uint8 codes")
        assert case.kernel_grid is not None
        _expect(case.kernel_grid.dtype == "int8" and not case.kernel_grid.zero_point, case, "symmetric int8 weights")
    if case.op in ("average_pool", "mean"):
        (x,), y = case.grids, case.output
        same = np.array_equal(x.scale, y.scale) and (x.zero_point, x.dtype) == (y.zero_point, y.dtype)
        _expect(same, case, "an output on the input's grid, as PyTorch's averages keep it")
    inputs, request = case.inputs, _attributes(runtime, case)
    if "explicit" in request:
        pad = [(0, 0), *request.pop("explicit"), (0, 0)]
        inputs = (np.pad(inputs[0], pad, constant_values=case.grids[0].zero_point),)
    return {
        "engine": runtime.engine,
        "channels_last": runtime.channels_last,
        "op": case.op,
        "inputs": inputs,
        "grids": [_grid(grid) for grid in case.grids],
        "output": _grid(case.output),
        "function": case.attributes.get("function", "quantize_per_tensor"),
        **request,
    }


def _attributes(runtime: TorchCpu, case: Case) -> dict[str, Any]:
    """What the operator is told beside its inputs."""
    found: dict[str, Any] = {}
    if case.op in _WEIGHTED:
        assert case.kernel is not None
        assert case.kernel_grid is not None
        axes = (1, 0) if case.op == "fully_connected" else (3, 2, 0, 1)
        found["kernel"] = case.kernel.transpose(axes)
        found["kernel_scale"] = case.kernel_grid.scale
        found["bias"] = None if case.bias is None else np.broadcast_to(float_bias(case), case.bias.shape).copy()
    if case.op in ("conv2d", "depthwise_conv2d"):
        assert case.kernel is not None
        found["groups"] = case.inputs[0].shape[3] // case.kernel.shape[2]
        found.update(_window(case))
    elif case.op == "average_pool":
        found["window"] = list(window(case))
        found.update(_window(case))
        _expect("explicit" not in found, case, "padding alike on both sides")
        _expect(
            runtime.engine != "qnnpack" or not any(found["padding"]), case, "no padding, which qnnpack counts as codes"
        )
    elif case.op == "mean":
        _expect(case.inputs[0].ndim == 4 and tuple(case.attributes["axes"]) == (1, 2), case, "axes 1 and 2 of an image")
        found["axes"] = [2, 3]
    return found


def _window(case: Case) -> dict[str, Any]:
    """Strides and padding; padding that differs from side to side is made of codes beforehand."""
    pads = padding(case)
    steps = list(strides(case))
    if all(low == high for low, high in pads):
        return {"strides": steps, "padding": [low for low, _ in pads]}
    return {"strides": steps, "padding": [0, 0], "explicit": pads}


def _grid(grid: Grid) -> dict[str, Any]:
    return {"scale": np.float32(grid.scale), "zero_point": grid.zero_point, "dtype": grid.dtype}


def _expect(condition: bool, case: Case, what: str) -> None:
    if not condition:
        grids = ", ".join(f"{g.dtype} (scale {g.scale}, zero point {g.zero_point})" for g in (*case.grids, case.output))
        raise ValueError(f"PyTorch's {case.op} takes {what}. Got grids {grids}, attributes {dict(case.attributes)}.")
