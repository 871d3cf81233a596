"""The rows of the matrix that ExecuTorch answers."""

from collections.abc import Callable, Sequence
from functools import partial

from conformance import cases
from conformance.case import Case
from conformance.matrix import Row
from conformance.runtimes.executorch import held

_FLOATS = (
    "the delegate computes it in float32 between two tensors of int8, which no formula of the codes follows exactly"
)


def executorch_rows() -> list[Row]:
    """Products hold only biases that a float can hold, see `executorch.held`."""
    runtime, target = "executorch", "executorch_xnnpack"

    def holding(make: Callable[[], Sequence[Case]]) -> list[Case]:
        return [held(case) for case in make()]

    products = [
        Row(
            runtime, f"{label}, {scales}", target, partial(holding, partial(make, "int8", per_channel=channels, **more))
        )
        for label, make, more in (
            ("linear", cases.fully_connected, {}),
            ("conv2d", cases.conv2d, {}),
            ("depthwise conv2d", cases.depthwise_conv2d, {"channels": cases.DEPTHWISE_CHANNELS}),
            ("depthwise conv2d, multiplier 2", cases.depthwise_conv2d, {"multiplier": 2}),
        )
        for scales, channels in (("per tensor", False), ("per channel", True))
    ]
    pool = partial(cases.average_pool, "int8", same_grid=False, padding=False)
    floats = {
        "avg_pool2d": pool,
        "bmm": partial(cases.matmul, "int8"),
        "softmax": cases.softmax,
        "sigmoid": partial(cases.table, "logistic", "int8", near_ties=True),
        "tanh": partial(cases.table, "tanh", "int8", near_ties=True),
    }
    return [
        *products,
        Row(runtime, "add", target, partial(cases.elementwise, "add", "int8")),
        Row(runtime, "mul", target, partial(cases.elementwise, "multiply", "int8")),
        Row(runtime, "dequantize, quantize", target, partial(cases.rescale, "int8", "int8", count=400)),
        Row(runtime, "quantize", target, partial(cases.quantize, "int8")),
        Row(runtime, "mean over height and width", target, partial(cases.mean, "int8")),
        *(Row(runtime, op, target, make, exact=False, note=_FLOATS) for op, make in floats.items()),
    ]
