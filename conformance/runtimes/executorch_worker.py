"""What the process that holds ExecuTorch computes (`process`): a model of one operation, on the XNNPACK delegate.

The model is written as ExecuTorch's quantizer leaves it: every tensor goes through the operators quantize_per_tensor
and dequantize_per_tensor, weights are stored as codes and dequantized, biases are floats. It imports numpy, torch and
executorch only. `executorch` writes the requests.
"""

import importlib
import importlib.metadata
import warnings
from typing import Any

import numpy as np

_INT8 = (-128, 127)
_INT32 = (-(2**31), 2**31 - 1)


def _torch() -> Any:
    return importlib.import_module("torch")


def start() -> str:
    """The versions of both packages, once they are there."""
    torch = _torch()
    torch.set_num_threads(1)
    importlib.import_module("executorch.runtime")
    warnings.simplefilter("ignore")
    return f"executorch {importlib.metadata.version('executorch')}, torch {torch.__version__.partition('+')[0]}"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The answer "codes", images as NHWC, and "left": the operators that the delegate did not take.

    Raises:
      ValueError: ExecuTorch would store another bias than the request's.
    """
    torch = _torch()
    if "kernel" in request:
        _check_bias(request)
    given = [_reals(x, grid) for x, grid in zip(request["inputs"], request["grids"], strict=True)]
    exported = torch.export.export(_module(request).eval(), tuple(given))
    partitioner = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    lowered = importlib.import_module("executorch.exir").to_edge_transform_and_lower(
        exported, partitioner=[partitioner.XnnpackPartitioner()]
    )
    called = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    left = [name for name in called if "executorch_call_delegate" not in name and "getitem" not in name]
    program = importlib.import_module("executorch.runtime").Runtime.get().load_program(lowered.to_executorch().buffer)
    (reals,) = program.load_method("forward").execute(tuple(given))
    scale, zero_point = request["output"]
    # these numbers lie on the grid, so their codes are exact
    codes = np.rint(reals.numpy().astype(np.float64) / np.float64(scale)) + zero_point
    codes = codes.transpose(0, 2, 3, 1) if codes.ndim == 4 else codes
    return {"codes": codes.astype(np.int8), "left": left}


def _operators() -> Any:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return _torch().ops.quantized_decomposed


def _check_bias(request: dict[str, Any]) -> None:
    """ExecuTorch quantizes the float bias by this operator, at s_x * s_w."""
    torch, operators = _torch(), _operators()
    bias, scale = torch.from_numpy(request["float_bias"]), request["kernel_scale"]
    s_x = float(request["grids"][0][0])
    if scale.ndim:
        zeros = torch.zeros(scale.size, dtype=torch.int64)
        step = torch.from_numpy(scale) * s_x
        codes = operators.quantize_per_channel(bias, step, zeros, 0, *_INT32, torch.int32)
    else:
        codes = operators.quantize_per_tensor(bias, float(scale) * s_x, 0, *_INT32, torch.int32)
    if not np.array_equal(codes.numpy(), request["bias"]):
        raise ValueError("ExecuTorch stores another bias than the case has; make the case with executorch.held.")


def _reals(x: np.ndarray, grid: tuple[Any, int] | None) -> Any:
    """The numbers that a model is fed, images as NCHW."""
    reals = x if grid is None else (x.astype(np.float32) - np.float32(grid[1])) * np.float32(grid[0])
    tensor = _torch().from_numpy(np.ascontiguousarray(reals))
    return tensor.permute(0, 3, 1, 2).contiguous() if tensor.dim() == 4 else tensor


def _module(request: dict[str, Any]) -> Any:
    torch, operators = _torch(), _operators()
    output = request["output"]

    def fake_quantized(x: Any, grid: tuple[Any, int] | None) -> Any:
        if grid is None:
            return x
        known = (float(grid[0]), int(grid[1]), *_INT8, torch.int8)
        return operators.dequantize_per_tensor(operators.quantize_per_tensor(x, *known), *known)

    class Operation(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        """The operation between quantized tensors."""

        def __init__(self) -> None:
            super().__init__()
            if "kernel" in request:
                scale = request["kernel_scale"]
                kept = torch.nn.Parameter
                self.weight = kept(torch.from_numpy(np.ascontiguousarray(request["kernel"])), requires_grad=False)
                self.bias = kept(torch.from_numpy(request["float_bias"]), requires_grad=False)
                self.register_buffer("scale", torch.from_numpy(np.atleast_1d(scale)))
                self.register_buffer("zero_point", torch.zeros(scale.size, dtype=torch.int64))

        def forward(self, *given: Any) -> Any:
            """The output's numbers."""
            x = [fake_quantized(tensor, grid) for tensor, grid in zip(given, request["grids"], strict=True)]
            return fake_quantized(_compute(request, x, self), output)

        def kernel(self) -> Any:
            """The weight's numbers."""
            scale = request["kernel_scale"]
            if scale.ndim:
                known = (self.scale, self.zero_point, 0, -127, 127, torch.int8)
                return operators.dequantize_per_channel(self.weight, *known)
            return operators.dequantize_per_tensor(self.weight, float(scale), 0, -127, 127, torch.int8)

    return Operation()


def _compute(request: dict[str, Any], x: list[Any], module: Any) -> Any:
    torch, op = _torch(), request["op"]
    functional = torch.nn.functional
    match op:
        case "fully_connected":
            return functional.linear(x[0], module.kernel(), module.bias)
        case "conv2d" | "depthwise_conv2d":
            known = (request["strides"], request["padding"], 1, request["groups"])
            return functional.conv2d(x[0], module.kernel(), module.bias, *known)
        case "add":
            return x[0] + x[1]
        case "multiply":
            return x[0] * x[1]
        case "matmul":
            return torch.bmm(*x)
        case "average_pool":
            known = (request["window"], request["strides"], request["padding"])
            return functional.avg_pool2d(x[0], *known, count_include_pad=False)
        case "mean":
            return torch.mean(x[0], request["axes"], keepdim=True)
        case "softmax":
            return torch.softmax(x[0], -1)
        case "logistic":
            return torch.sigmoid(x[0])
        case "tanh":
            return torch.tanh(x[0])
        case "rescale" | "quantize":
            return x[0]
        case _:
            raise ValueError(f"ExecuTorch: unknown operation {op!r}.")
