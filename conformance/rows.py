"""The rows of the matrix, and which adapter answers for which runtime."""

import dataclasses
import importlib
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance import accumulators, cases
from conformance.accumulators import Records
from conformance.case import Case
from conformance.cpu import Cpu
from conformance.executorch_rows import executorch_rows
from conformance.matrix import InputRow, RecordRow, Row
from qjax.numerics.input_quantization import InputQuantization

AnyRow = Row | RecordRow


def _adapter(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Makes the adapter of a runtime, whose module is imported only then: it may not be installed."""

    def make() -> Any:
        return getattr(importlib.import_module(f"conformance.runtimes.{module}"), name)(*arguments, **options)

    return make


_ONNXRUNTIME = partial(_adapter, "onnxruntime", "OnnxRuntime")
_TORCH = partial(_adapter, "torch_cpu", "TorchCpu")

ADAPTERS: dict[str, Callable[[], Any]] = {
    "tflite-micro": _adapter("tflite_micro", "TFLiteMicro"),
    **{f"litert-{mode}": _adapter("litert", "LiteRT", mode) for mode in ("reference", "optimized", "xnnpack")},
    **{f"litert-{mode}-arm": _adapter("litert_arm", "LiteRTArm", mode) for mode in ("optimized", "xnnpack")},
    "onnxruntime": _ONNXRUNTIME(precise=True),
    "onnxruntime-qdq": _ONNXRUNTIME(precise=True, form="qdq", fuse_int8=True),
    "onnxruntime-avx2": _ONNXRUNTIME(),
    "openvino": _adapter("openvino", "Openvino"),
    "executorch": _adapter("executorch", "ExecuTorch"),
    "neon": _adapter("neon", "Neon"),
    "tvm": _adapter("tvm", "Tvm"),
    **{f"torch-{engine}": _TORCH(engine) for engine in ("fbgemm", "x86", "qnnpack", "onednn")},
    "onnxruntime-vnni": _ONNXRUNTIME(),
    **{f"torch-{engine}-vnni": _TORCH(engine, instructions="native") for engine in ("fbgemm", "x86", "onednn")},
}


_QUANTIZE_TAIL = (
    "the cases hold whole vectors of 8 numbers; of a tensor of another size, the last size mod 8 numbers "
    "become round(double(x) / double(s)) + z, ties away from zero"
)


def _known_tanhf() -> bool:
    """Whether this machine's C library, which LiteRT asks for its table of tanh, is one whose tanhf qjax has."""
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < (2, 41)


def _tflite(runtime: str, target: str) -> list[AnyRow]:
    depthwise = partial(cases.depthwise_conv2d, channels=cases.DEPTHWISE_CHANNELS)
    tables = partial(cases.table, count=400, near_ties=True)
    fixed_point = runtime == "tflite-micro"
    living = runtime in ("litert-reference", "litert-optimized", "litert-xnnpack")
    weighted, wide = (
        [
            Row(runtime, f"{label}{bits}, {scales}", target, partial(make, x, per_channel=per_channel))
            for label, make in (
                ("FULLY_CONNECTED", cases.fully_connected),
                ("CONV_2D", cases.conv2d),
                ("DEPTHWISE_CONV_2D", depthwise),
            )
            for scales, per_channel in (("per tensor", False), ("per channel", True))
        ]
        for x, bits in (("int8", ""), ("int16", " int16 x int8"))
    )
    return [
        *weighted,
        Row(
            runtime,
            "DEPTHWISE_CONV_2D, multiplier 2",
            target,
            partial(depthwise, "int8", per_channel=True, multiplier=2),
        ),
        *wide,
        Row(runtime, "ADD", target, partial(cases.elementwise, "add", "int8")),
        Row(runtime, "MUL", target, partial(cases.elementwise, "multiply", "int8")),
        *([Row(runtime, "BATCH_MATMUL", target, partial(cases.matmul, "int8"))] if living or fixed_point else []),
        Row(runtime, "QUANTIZE int8 to int8", target, partial(cases.rescale, "int8", "int8")),
        Row(
            runtime,
            "QUANTIZE float32 to int8",
            target,
            partial(cases.quantize, "int8"),
            note=_QUANTIZE_TAIL if runtime.startswith("litert-optimized") else "",
        ),
        Row(runtime, "AVERAGE_POOL_2D", target, partial(cases.average_pool, "int8", same_grid=True)),
        Row(runtime, "MEAN", target, partial(cases.mean, "int8")),
        *([Row(runtime, "MEAN, other axes", target, partial(cases.mean_elsewhere, "int8"))] if living else []),
        Row(runtime, "LOGISTIC", target, partial(tables, "logistic", "int8")),
        Row(runtime, "TANH", target, partial(cases.table, "tanh", "int8", count=400)),
        Row(
            runtime,
            "TANH, near ties",
            target,
            partial(tables, "tanh", "int8"),
            exact=fixed_point or _known_tanhf(),
            note="" if fixed_point else "qjax has the tanhf of glibc up to 2.40; from 2.41 on it is another function",
        ),
        Row(runtime, "SOFTMAX", target, cases.softmax),
    ]


def _tflite_arm(runtime: str, target: str) -> list[AnyRow]:
    """Beside the operations of `_tflite`, where the kernels for AArch64 have ways of their own."""
    rows: list[AnyRow] = [*_tflite(runtime, target), Row(runtime, "MEAN, ties of float32", target, cases.mean_fused)]
    for scales, per_channel in (("per tensor", False), ("per channel", True)):
        single = partial(cases.single_rows, per_channel=per_channel)
        rows.append(Row(runtime, f"single rows and pixels, {scales}", target, single))
        if runtime == "litert-optimized-arm":  # XNNPACK accepts scales below 256 only.
            above = partial(cases.depthwise_scales_above_1, per_channel=per_channel)
            rows.append(Row(runtime, f"DEPTHWISE_CONV_2D, scales above 1, {scales}", target, above))
    return rows


def _float_table(runtime: str, op: str, target: str, function: str, x: str) -> Row:
    """A function that the runtime computes by an approximation in float32, which qjax's exact table cannot follow."""
    note = "qjax's table is correctly rounded, the runtime's float32 function is not; 3 inputs of 4 are made near a tie"
    make = partial(cases.table, function, x, count=400, near_ties=True)
    return Row(runtime, op, target, make, exact=False, note=note)


def _onnx(runtime: str, target: str) -> list[AnyRow]:
    rows: list[AnyRow] = []
    qdq = runtime.endswith("qdq")
    names = ("MatMul", "Conv", "depthwise Conv") if qdq else ("QLinearMatMul", "QLinearConv", "depthwise QLinearConv")
    for label, make in zip(names, (cases.fully_connected, cases.conv2d, cases.depthwise_conv2d), strict=True):
        for x, kernel in (("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")):
            for scales, per_channel in (("per tensor", False), ("per channel", True)):
                if kernel == "uint8" and per_channel:
                    continue
                rows.append(
                    Row(
                        runtime,
                        f"{label} {x} x {kernel}, {scales}",
                        target,
                        partial(make, x, per_channel=per_channel, kernel=kernel),
                    )
                )
    for x in ("int8", "uint8"):
        rows += [
            Row(runtime, f"{'Add' if qdq else 'QLinearAdd'} {x}", target, partial(cases.elementwise, "add", x)),
            Row(runtime, f"{'Mul' if qdq else 'QLinearMul'} {x}", target, partial(cases.elementwise, "multiply", x)),
            Row(runtime, f"{names[0]} of activations {x}", target, partial(cases.matmul, x)),
            Row(
                runtime,
                f"{'AveragePool' if qdq else 'QLinearAveragePool'} {x}",
                target,
                partial(cases.average_pool, x, same_grid=False),
            ),
            Row(runtime, f"GlobalAveragePool {x}", target, partial(cases.mean, x)),
            _float_table(runtime, f"{'Sigmoid' if qdq else 'QLinearSigmoid'} {x}", target, "logistic", x),
            Row(
                runtime,
                f"{'Softmax' if qdq else 'QLinearSoftmax'} {x}",
                target,
                partial(cases.softmax_on_any_grid, x),
            ),
        ]
        if qdq:
            rows.append(_float_table(runtime, f"Tanh {x}", target, "tanh", x))
        else:
            rows += [
                Row(runtime, f"DequantizeLinear, QuantizeLinear {x}", target, partial(cases.rescale, x, x)),
                Row(runtime, f"QuantizeLinear {x}", target, partial(cases.quantize, x)),
            ]
    return rows


def _uint8_products(
    runtime: str, target: str, cpu: Cpu, made: Sequence[tuple[str, Any, dict[str, Any]]]
) -> list[AnyRow]:
    """Products of uint8 with int8 weights; made: labels, cases and their options."""
    return [
        Row(runtime, f"{label}, {scales}", target, partial(make, "uint8", per_channel=per_channel, **more), cpu=cpu)
        for label, make, more in made
        for scales, per_channel in (("per tensor", False), ("per channel", True))
    ]


def _onnx_avx2() -> list[AnyRow]:
    made = (
        ("QLinearMatMul uint8 x int8", cases.fully_connected, {}),
        ("QLinearConv uint8 x int8", cases.conv2d, {}),
        ("depthwise QLinearConv uint8 x int8", cases.depthwise_conv2d, {}),
        ("depthwise QLinearConv, multiplier 2, uint8 x int8", cases.depthwise_conv2d, {"multiplier": 2}),
    )
    return _uint8_products("onnxruntime-avx2", "onnxruntime_avx2", "no VNNI", made)


def _openvino_rows() -> list[AnyRow]:
    runtime, target = "openvino", "openvino_cpu"
    made = (
        ("MatMul", cases.fully_connected, {}),
        ("Conv", cases.conv2d, {}),
        ("depthwise Conv", cases.depthwise_conv2d, {"channels": cases.DEPTHWISE_CHANNELS}),
        ("depthwise Conv, multiplier 2", cases.depthwise_conv2d, {"multiplier": 2}),
    )
    rows = _uint8_products(runtime, target, "AVX-512 VNNI", made)
    return [
        *rows,
        Row(runtime, "Add", target, partial(cases.elementwise, "add", "uint8")),
        Row(runtime, "Mul", target, partial(cases.elementwise, "multiply", "uint8")),
        Row(runtime, "a change of scale", target, partial(cases.rescale, "uint8", "uint8", count=400)),
        Row(runtime, "inputs of float32", target, partial(cases.quantize, "uint8")),
        Row(runtime, "AveragePool", target, partial(cases.average_pool, "uint8", same_grid=False)),
        Row(runtime, "ReduceMean over height and width", target, partial(cases.mean, "uint8")),
        Row(runtime, "ReduceMean, other axes", target, partial(cases.mean_elsewhere, "uint8")),
    ]


def _float32_multipliers() -> Records:
    """Multipliers of 24 bits: XNNPACK makes its own from a float32 scale."""
    acc, multiplier, shift = accumulators.all_records()
    return Records(acc, multiplier & np.int32(-128), shift)


def _few_pairs(shifts: tuple[int, ...]) -> Records:
    """131,072 accumulators under 64 pairs of multiplier and shift, each of which TVM compiles into a function."""
    words = accumulators.splitmix64(2 * 131_072, 7)
    pairs = accumulators.random(64 // len(shifts) + 1, shifts, seed=3)
    which = np.arange(131_072) % 64
    multiplier, shift = pairs.multiplier[which], pairs.shift[which]
    # One in eight is a power of two, for which kernels have a path of their own.
    multiplier = np.where(which % 8 == 0, np.int32(2**30), multiplier)
    acc = (words[:131_072].astype(np.int64) >> (32 + (words[131_072:] >> np.uint64(59))).astype(np.int64)).astype(
        np.int32
    )
    edges = accumulators.edge_accumulators()
    acc[: 64 * len(edges)] = np.repeat(edges, 64)
    return Records(acc, multiplier, shift)


_NEGATIVE = (-1, -2, -3, -4, -5, -7, -9, -12, -16, -24, -30)


def _rules() -> list[AnyRow]:
    rows: list[AnyRow] = [
        RecordRow("neon", label, "tvm_neon" if rule == "neon" else "", rule, accumulators.all_records)
        for label, rule in (
            ("SQRDMULH, SRSHL", "neon"),
            ("SQRDMULH, SRSHL with gemmlowp's fix-up", "double_round"),
            ("SQDMULH, SRSHL", "ruy"),
            ("64-bit product, one shift", "single_round"),
        )
    ]
    return [
        *rows,
        RecordRow("neon", "XNNPACK's rndnu", "", "xnnpack_rndnu", _float32_multipliers),
        RecordRow("tvm", "q_multiply_shift", "tvm", "tvm", partial(_few_pairs, (*_NEGATIVE, 0, 2, 5))),
        RecordRow("tvm", "q_multiply_shift_per_axis", "tvm", "single_round", partial(_few_pairs, (*_NEGATIVE, 0))),
        RecordRow("tvm", "q_multiply_shift, NEON lowering", "tvm_neon", "neon", partial(_few_pairs, _NEGATIVE)),
    ]


def _quantize(y: str, function: str) -> list[Case]:
    return [dataclasses.replace(case, attributes={"function": function}) for case in cases.quantize(y)]


_SEVEN_BITS = (0, 127)
_WEIGHTED = {"linear": cases.fully_connected, "conv2d": cases.conv2d, "depthwise conv2d": cases.depthwise_conv2d}
_ONE_CODE = "oneDNN's depthwise kernel for AVX-512 rounds one sum another way, for a reason that is not known"


def _vnni() -> list[AnyRow]:
    """Weighted operations on 8-bit activations on a CPU with AVX-512 VNNI, which multiplies uint8 by int8 exactly.

    PyTorch's engine x86 leaves convolutions of up to 100 groups to oneDNN there, see `should_use_onednn_quant` in
    PyTorch's aten/src/ATen/native/quantized/cpu/OnednnUtils.h. FBGEMM's depthwise kernel is not one of the targets'.
    """
    rows: list[AnyRow] = []
    for runtime, target, layers in (
        ("onnxruntime-vnni", "onnxruntime", ("linear", "conv2d", "depthwise conv2d", "depthwise conv2d, multiplier 2")),
        ("torch-fbgemm-vnni", "torch_fbgemm", ("linear", "conv2d")),
        ("torch-x86-vnni", "torch_onednn", ("conv2d", "depthwise conv2d")),
        ("torch-onednn-vnni", "torch_onednn", ("linear", "conv2d", "depthwise conv2d")),
    ):
        for label in layers:
            for scales, per_channel in (("per tensor", False), ("per channel", True)):
                more: dict[str, Any] = {"multiplier": 2} if "multiplier" in label else {}
                made = partial(_WEIGHTED[label.partition(",")[0]], "uint8", per_channel=per_channel, **more)
                note = (
                    _ONE_CODE if (target, label, scales) == ("torch_onednn", "depthwise conv2d", "per tensor") else ""
                )
                op = f"{label}, {scales}, 8 bits"
                rows.append(Row(runtime, op, target, made, exact=not note, note=note, cpu="AVX-512 VNNI"))
    return rows


def _pytorch(engine: str, target: str) -> list[AnyRow]:
    """Weighted operations on activations of 7 bits, whose pairs of products fit int16 on every machine."""
    runtime = f"torch-{engine}"
    # qnnpack's products are exact without further steps.
    codes = None if engine == "qnnpack" else _SEVEN_BITS
    rows: list[AnyRow] = []
    for label, make in _WEIGHTED.items():
        for scales, per_channel in (("per tensor", False), ("per channel", True)):
            known = partial(make, "uint8", per_channel=per_channel)
            bits = "" if codes is None else ", 7 bits"
            cpu = "no AVX-512 VNNI" if engine == "x86" and "conv" in label else "any"
            rows.append(Row(runtime, f"{label}, {scales}{bits}", target, partial(known, codes=codes), cpu=cpu))
            if codes is not None:
                avx2 = "torch_onednn_avx2" if engine == "onednn" else "torch_fbgemm_avx2"
                rows.append(Row(runtime, f"{label}, {scales}, AVX2", avx2, known, cpu=cpu))
    if engine == "x86":
        return rows
    if engine == "fbgemm":
        functions: dict[str, InputQuantization] = {
            "fake_quantize": "reciprocal",
            "quantize_per_channel": "reciprocal_inside",
        }
        rows += [
            InputRow(runtime, f"{function} {y}", "", partial(_quantize, y, function), quantization=formula)
            for function, formula in functions.items()
            for y in ("uint8", "int8")
        ]
    for x in ("uint8",) if engine == "qnnpack" else ("uint8", "int8"):
        rows += [
            Row(runtime, f"add {x}", target, partial(cases.elementwise, "add", x)),
            Row(runtime, f"mul {x}", target, partial(cases.elementwise, "multiply", x)),
            Row(runtime, f"dequantize, quantize_per_tensor {x}", target, partial(cases.rescale, x, x)),
            Row(runtime, f"quantize_per_tensor {x}", target, partial(cases.quantize, x)),
            Row(runtime, f"avg_pool2d {x}", target, partial(cases.average_pool, x, same_grid=True, padding=False)),
            Row(runtime, f"adaptive_avg_pool2d(1) {x}", target, partial(cases.mean, x, same_grid=True)),
            _float_table(runtime, f"sigmoid {x}", target, "logistic", x),
            _float_table(runtime, f"tanh {x}", target, "tanh", x),
        ]
    return rows


ROWS: list[AnyRow] = [
    *_tflite("tflite-micro", "tflite_micro"),
    *_tflite("litert-reference", "tflite_reference"),
    *_tflite("litert-optimized", "tflite_optimized_x86"),
    *_tflite("litert-xnnpack", "tflite_xnnpack"),
    *_tflite_arm("litert-optimized-arm", "tflite_optimized_arm"),
    *_tflite_arm("litert-xnnpack-arm", "tflite_xnnpack_arm"),
    *_onnx("onnxruntime", "onnxruntime"),
    *_onnx("onnxruntime-qdq", "onnxruntime"),
    *_onnx_avx2(),
    *_openvino_rows(),
    *executorch_rows(),
    *_rules(),
    *_pytorch("fbgemm", "torch_fbgemm"),
    *_pytorch("x86", "torch_fbgemm"),
    *_pytorch("qnnpack", "torch_qnnpack"),
    *_pytorch("onednn", "torch_onednn"),
    *_vnni(),
]
