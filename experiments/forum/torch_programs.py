"""PyTorch programs that the scripts compare with, in a process of their own.

`ask` runs this file under the Python that has PyTorch, with AVX2, on one thread; arrays travel pickled. The programs
are what `torch.ao.quantization` puts into a model, called one by one with grids that are given: `prepare` and
`convert` would choose these grids from data, and change nothing else. `conformance` has an adapter for single
operators; here are those with a bias of floats, fake quantization, and adaptive pooling in both layouts.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np

_AVX2 = {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def ask(calls: list[dict[str, Any]]) -> tuple[str, list[Any]] | None:
    """The version of PyTorch and the answers; None where there is no PyTorch.

    calls: keyword arguments of a program of this file, and its name as `program`.
    """
    from conformance.runtimes.torch_cpu import PYTHON

    python = sys.executable if importlib.util.find_spec("torch") is not None else os.environ.get(PYTHON)
    if python is None:
        return None
    environment = {**os.environ, **_AVX2}
    done = subprocess.run([python, __file__], input=pickle.dumps(calls), env=environment, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{python} ended with status {done.returncode}:\n{done.stderr.decode(errors='replace')}")
    return pickle.loads(done.stdout)


def adaptive_average(codes: np.ndarray, scale: float, zero_point: int, engine: str, channels_last: bool) -> np.ndarray:
    """adaptive_avg_pool2d(x, 1) of uint8 codes (batch, height, width, channels)."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.quantized.engine = engine
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.from_numpy(codes).permute(0, 3, 1, 2).contiguous(memory_format=layout)
    x = torch._make_per_tensor_quantized_tensor(x, scale, zero_point)
    return torch.nn.functional.adaptive_avg_pool2d(x, 1).int_repr().numpy()[:, :, 0, 0]


def linear(
    x: np.ndarray,
    x_grid: tuple[float, int],
    kernel: np.ndarray,
    kernel_scale: float,
    bias: np.ndarray,
    y_grid: tuple[float, int],
    engine: str,
) -> dict[str, Any]:
    """Quantize, Linear, DeQuantize: codes and reals of the output, codes of x and of a weight quantized again.

    x, bias: float32. kernel: int8 codes (in, out).
    """
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.quantized.engine = engine
    weight = torch._make_per_tensor_quantized_tensor(torch.from_numpy(kernel.T.copy()), kernel_scale, 0)
    packed = torch.ops.quantized.linear_prepack(weight, torch.from_numpy(bias))
    q = torch.quantize_per_tensor(torch.from_numpy(x), *x_grid, torch.quint8)
    y = torch.ops.quantized.linear(q, packed, *y_grid)
    again = torch.quantize_per_tensor(weight.dequantize(), kernel_scale, 0, torch.qint8)
    return {
        "x": q.int_repr().numpy(),
        "kernel": again.int_repr().numpy().T,
        "codes": y.int_repr().numpy(),
        "reals": y.dequantize().numpy(),
    }


def convolution(
    x: np.ndarray,
    x_grid: tuple[float, int],
    kernel: np.ndarray,
    kernel_scale: float,
    bias: np.ndarray,
    y_grid: tuple[float, int],
    engine: str,
) -> dict[str, Any]:
    """A model in training and converted: fake quantization around conv2d, and quantized::conv2d.

    x: float32 NHWC. kernel: float32 HWIO. Reals of both, NHWC, and the codes of the second.
    """
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.quantized.engine = engine
    fake = torch.fake_quantize_per_tensor_affine
    image, w = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(kernel).permute(3, 2, 0, 1)
    w, b = w.contiguous(), torch.from_numpy(bias)
    trained = fake(image, *x_grid, 0, 255)
    trained = torch.nn.functional.conv2d(trained, fake(w, kernel_scale, 0, -128, 127), b)
    trained = fake(trained, *y_grid, 0, 255)

    weight = torch.quantize_per_tensor(w, kernel_scale, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, b, [1, 1], [0, 0], [1, 1], 1)
    q = torch.quantize_per_tensor(image, *x_grid, torch.quint8)
    y = torch.ops.quantized.conv2d(q, packed, *y_grid)
    return {
        "trained": trained.permute(0, 2, 3, 1).numpy().copy(),
        "converted": y.dequantize().permute(0, 2, 3, 1).numpy().copy(),
        "codes": y.int_repr().permute(0, 2, 3, 1).numpy().copy(),
        "x": q.int_repr().permute(0, 2, 3, 1).numpy().copy(),
    }


_PROGRAMS = {"adaptive_average": adaptive_average, "linear": linear, "convolution": convolution}


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    warnings.simplefilter("ignore")  # PyTorch announces the end of these operators
    torch.set_num_threads(1)
    answers = []
    for call in pickle.load(sys.stdin.buffer):
        answers.append(_PROGRAMS[call.pop("program")](**call))
    sys.stdout.buffer.write(pickle.dumps((f"torch {torch.__version__}", answers)))


if __name__ == "__main__":
    main()
