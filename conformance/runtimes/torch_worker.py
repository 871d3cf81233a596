"""What the process that holds PyTorch computes (`process`).

It imports numpy and torch only: PyTorch reads which instructions it may use once, when it starts, and may live in
another Python than qjax. `torch_cpu` writes the requests.
"""

import importlib
from typing import Any

import numpy as np

_DTYPES = {"uint8": "quint8", "int8": "qint8"}


def _torch() -> Any:
    return importlib.import_module("torch")


def start() -> str:
    """PyTorch's version, once it is there and keeps to one thread."""
    torch = _torch()
    torch.set_num_threads(1)
    return str(torch.__version__)


def run(request: dict[str, Any]) -> np.ndarray:
    """The output's codes; images are NHWC on the way in and out."""
    torch = _torch()
    torch.backends.quantized.engine = request["engine"]
    op, inputs, output = request["op"], request["inputs"], request["output"]
    scale, zero_point = float(output["scale"]), int(output["zero_point"])
    dtype = getattr(torch, _DTYPES[output["dtype"]])
    if op == "quantize":
        return _quantize(request["function"], torch.from_numpy(inputs[0]), scale, zero_point, output["dtype"])
    last = request["channels_last"]
    q = [_quantized(x, grid, last) for x, grid in zip(inputs, request["grids"], strict=True)]
    if op == "fully_connected":
        packed = torch.ops.quantized.linear_prepack(_kernel(request), _bias(request))
        return _codes(torch.ops.quantized.linear(q[0], packed, scale, zero_point))
    if op in ("conv2d", "depthwise_conv2d"):
        packed = torch.ops.quantized.conv2d_prepack(
            _kernel(request), _bias(request), request["strides"], request["padding"], [1, 1], request["groups"]
        )
        return _codes(torch.ops.quantized.conv2d(q[0], packed, scale, zero_point))
    if op == "add":
        return _codes(torch.ops.quantized.add(*q, scale, zero_point))
    if op == "multiply":
        return _codes(torch.ops.quantized.mul(*q, scale, zero_point))
    if op == "rescale":
        return _codes(torch.quantize_per_tensor(q[0].dequantize(), scale, zero_point, dtype))
    if op == "average_pool":
        pool = torch.nn.functional.avg_pool2d
        y = pool(q[0], request["window"], request["strides"], request["padding"], count_include_pad=False)
        return _codes(y, output)
    if op == "mean":
        if last:
            return _codes(torch.nn.functional.adaptive_avg_pool2d(q[0], 1)[:, :, 0, 0], output)
        return _codes(torch.mean(q[0], dim=request["axes"]), output)
    if op == "logistic":
        return _codes(torch.ops.quantized.sigmoid(q[0], scale, zero_point), output)
    if op == "tanh":
        return _codes(torch.tanh(q[0]), output)
    assert op == "softmax", op
    return _codes(torch.ops.quantized.softmax(q[0], q[0].dim() - 1, scale, zero_point), output)


def _quantize(function: str, x: Any, scale: float, zero_point: int, codes: str) -> np.ndarray:
    torch = _torch()
    dtype = getattr(torch, _DTYPES[codes])
    if function == "quantize_per_tensor":
        return _codes(torch.quantize_per_tensor(x, scale, zero_point, dtype))
    if function == "quantize_per_channel":
        scales, zeros = torch.full((len(x),), scale), torch.full((len(x),), zero_point)
        return _codes(torch.quantize_per_channel(x, scales, zeros, 0, dtype))
    assert function == "fake_quantize", function
    info = np.iinfo(codes)
    y = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, int(info.min), int(info.max))
    # These numbers lie on the grid, so their codes are exact.
    return (torch.round(y / scale) + zero_point).numpy().astype(codes)


def _quantized(codes: np.ndarray, grid: dict[str, Any], channels_last: bool) -> Any:
    torch = _torch()
    x = torch.from_numpy(np.ascontiguousarray(codes))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    return torch._make_per_tensor_quantized_tensor(x, float(grid["scale"]), int(grid["zero_point"]))


def _kernel(request: dict[str, Any]) -> Any:
    torch = _torch()
    w, scale = torch.from_numpy(np.ascontiguousarray(request["kernel"])), request["kernel_scale"]
    if scale.ndim == 0:
        return torch._make_per_tensor_quantized_tensor(w, float(scale), 0)
    zeros = torch.zeros(scale.size, dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(w, torch.from_numpy(scale.astype(np.float64)), zeros, 0)


def _bias(request: dict[str, Any]) -> Any:
    return None if request["bias"] is None else _torch().from_numpy(request["bias"])


def _codes(y: Any, grid: dict[str, Any] | None = None) -> np.ndarray:
    """The codes, images as NHWC. grid: what the runtime's own choice of an output grid must be."""
    if grid is not None and (np.float32(y.q_scale()) != grid["scale"] or y.q_zero_point() != grid["zero_point"]):
        raise ValueError(
            f"the output's grid is PyTorch's choice here: expected scale {y.q_scale()} and zero point "
            f"{y.q_zero_point()}, got {grid['scale']} and {grid['zero_point']}; make the case with those."
        )
    codes = y.int_repr()
    return np.ascontiguousarray((codes.permute(0, 2, 3, 1) if codes.dim() == 4 else codes).numpy())
