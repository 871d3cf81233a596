"""A `Target` describes what one runtime computes, per operation; the conversion writes it into the graph's nodes."""

import dataclasses
from typing import Literal, get_args

from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.dynamic_formulas import DYNAMIC_FORMULAS, DynamicFormula
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS, InputQuantization
from qjax.numerics.interpolation import RESIZE_METHODS, ResizeMethod
from qjax.numerics.lstm import LSTM_METHODS, LstmMethod
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS, OutputDequantization
from qjax.numerics.qspec import QSpec
from qjax.numerics.rounding import Rounding
from qjax.numerics.rules import get_rule
from qjax.numerics.softmax import SOFTMAX_METHODS, SoftmaxMethod
from qjax.numerics.tables import TABLE_METHODS, TableMethod
from qjax.support.names import did_you_mean

ScaleForm = Literal["f64", "f32"]

_WEIGHTED = ("requantize", "per_channel", "dot", "dot_per_channel", "conv", "depthwise", "wide", "wide_dot")


@dataclasses.dataclass(frozen=True)
class Weighted:
    """How accumulators of products with weights become codes.

    Args:
      rule: a rule of `numerics.requantize`.
      scale: how the effective scale s_x * s_w / s_y is computed: in doubles ("f64"), or from the product rounded to
        float32 ("f32"), see `numerics.effective_scale`.

    Examples:
      >>> from qjax import targets
      >>> per_layer = targets.Weighted("double_round", scale="f32")
      >>> mine = targets.get("tflite_micro").replace(name="my_rounding", conv=per_layer)
    """

    rule: str = "nearest_even"
    scale: ScaleForm = "f64"

    def __post_init__(self) -> None:
        rule = get_rule(self.rule)
        if rule.needs_key:
            raise ValueError(f"Weighted: expected a deterministic rule, got {self.rule!r}, which needs a key per call.")
        if self.scale not in get_args(ScaleForm):
            raise ValueError(f"Weighted: expected a scale of the form 'f64' or 'f32', got {self.scale!r}.")


@dataclasses.dataclass(frozen=True)
class Target:
    """The arithmetic of a runtime: everything that determines its results bit for bit.

    An operation without a field here is one exact sum in 64 bits, rounded once.

    Args:
      name: how recipes and graphs refer to it.
      requantize: how matrix products and convolutions with weights become codes: a rule's name or a `Weighted`. With a
        name alone, the effective scale is computed in doubles.
      rounding: of the exact sum in operations without a formula.
      per_channel: the same for products whose weights have a scale per channel. None means as `requantize`.
      dot: the same for matrix products. None means as the two before.
      dot_per_channel: the same for matrix products with a scale per channel. None means as `dot`.
      conv: the same for convolutions.
      depthwise: the same for depthwise convolutions.
      wide: the same for products whose activations have 16 bits. None means as those of 8 bits.
      wide_dot: the same for matrix products of 16-bit activations. None means as `wide`.
      accumulator: the width of the sums, and what happens when they exceed it.
      depthwise_accumulator: that of depthwise convolutions with one filter per channel, if it differs.
      add: the formula of additions: a name from `qjax.ops.formulas`, a rule of requantization, or None.
      subtract: the formula of differences.
      multiply: the formula of products of two activations, element by element.
      matmul: the formula of matrix products of two activations.
      scaled_matmul: whether such a formula also computes g (a @ b) for a constant g > 0, by the first scale
        float32(s_a g), as an operator does. Otherwise such a product is one exact sum.
      rescale: the formula of a change of scale.
      mean: the formula of means.
      average_pool: the formula of average pooling.
      same_grid: which of "mean" and "average_pool" keep the scale of their input, and so share its quantizer.
      quantize: how float inputs become codes, see `numerics.input_quantization`.
      dequantize: how output codes become floats, see `numerics.output_dequantization`.
      tables: how the tables of 8-bit functions (logistic, tanh) are computed, see `numerics.tables`.
      softmax: how the codes of a softmax are computed, see `numerics.softmax`. None means that it is not known.
      resize: how images of codes are resized bilinearly, see `numerics.interpolation`.
      lstm: how a step of an LSTM is computed, see `numerics.lstm`. None means that it is not known.
      squared_difference: how squares of differences are computed, see `qjax.ops.squared_difference`: "exact", "tflite".
      svdf: how SVDF is computed, see `qjax.ops.svdf`: "exact" or "tflite". None means that it is not known.
      unit_grids: whether functions with values in [0, 1] or [-1, 1] have fixed scales at 8 bits: 1/256 with zero point
        -128, or 1/128 with zero point 0.
      mixed_widths: whether one layer may have activations of 8 bits and another of 16. A TFLite model is int8 or
        int16x8 as a whole; PyTorch's engines have 8 bits only.
      wide_weights: whether a layer may have weights of more than 8 bits.
      wide_activations: whether activations may have more than 8 bits; False for runtimes where this is not known.
      wide_zero_points: whether codes of more than 8 bits may have a zero point, or be unsigned. Otherwise they are
        int16 with zero point 0, and `convert` refuses others. False for runtimes where this is not known.
      dynamic: how products under `qjax.Dynamic(per="row")` quantize rows at run time and finish their sums: "onnx",
        "tflite" or "xnnpack", see `qjax.numerics.dynamic_formulas`. Products that the runtime lacks use "onnx".
      composed: operations without an operator in the runtime, which a program holds as chains of operators. An
        operation whose codes have no such chain stays one operation.
      description: what was modelled: runtime, version, kernels.

    Examples:
      >>> from qjax import targets
      >>> mine = targets.get("tflite_micro").replace(
      ...     name="my_chip", add="tosa_add", description="adds as TOSA does"
      ... )
      >>> targets.register(mine).name
      'my_chip'
    """

    name: str
    requantize: str | Weighted = "nearest_even"
    rounding: Rounding = Rounding.NEAREST_EVEN
    per_channel: str | Weighted | None = None
    dot: str | Weighted | None = None
    dot_per_channel: str | Weighted | None = None
    conv: str | Weighted | None = None
    depthwise: str | Weighted | None = None
    wide: str | Weighted | None = None
    wide_dot: str | Weighted | None = None
    accumulator: Accumulator = EXACT
    depthwise_accumulator: Accumulator | None = None
    add: str | None = None
    subtract: str | None = None
    multiply: str | None = None
    matmul: str | None = None
    scaled_matmul: bool = False
    rescale: str | None = None
    mean: str | None = None
    average_pool: str | None = None
    same_grid: frozenset[str] = frozenset()
    quantize: InputQuantization = "reciprocal"
    dequantize: OutputDequantization = "product"
    tables: TableMethod = "exact"
    softmax: SoftmaxMethod | None = None
    resize: ResizeMethod = "exact"
    lstm: LstmMethod | None = "exact"
    squared_difference: Literal["exact", "tflite"] = "exact"
    svdf: Literal["exact", "tflite"] | None = "exact"
    unit_grids: bool = False
    mixed_widths: bool = True
    wide_weights: bool = True
    wide_activations: bool = False
    wide_zero_points: bool = False
    dynamic: DynamicFormula = "onnx"
    composed: frozenset[str] = frozenset()
    description: str = ""

    def __post_init__(self) -> None:
        for field in _WEIGHTED:
            value = getattr(self, field)
            if isinstance(value, str):
                try:
                    object.__setattr__(self, field, Weighted(value))
                except ValueError as error:
                    raise ValueError(f"Target {self.name!r}, {field}: {error}") from None
        object.__setattr__(self, "rounding", Rounding.of(self.rounding))
        if self.rounding is Rounding.STOCHASTIC:
            raise ValueError(
                f"Target {self.name!r}: expected a deterministic rounding; a stochastic one needs a key per call."
            )
        object.__setattr__(self, "same_grid", frozenset(self.same_grid))
        object.__setattr__(self, "composed", frozenset(self.composed))
        if not self.same_grid <= {"mean", "average_pool"}:
            raise ValueError(
                f"Target {self.name!r}: same_grid: expected 'mean' and 'average_pool' only, got "
                f"{sorted(self.same_grid)}."
            )
        if self.quantize not in INPUT_QUANTIZATIONS:
            raise ValueError(
                f"Target {self.name!r}: quantize must be one of {', '.join(INPUT_QUANTIZATIONS)}. "
                f"Got {self.quantize!r}."
            )
        for field, known in (
            ("dequantize", OUTPUT_DEQUANTIZATIONS),
            ("tables", TABLE_METHODS),
            ("dynamic", DYNAMIC_FORMULAS),
            ("softmax", (None, *SOFTMAX_METHODS)),
            ("resize", RESIZE_METHODS),
            ("lstm", (None, *LSTM_METHODS)),
            ("squared_difference", ("exact", "tflite")),
            ("svdf", (None, "exact", "tflite")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"Target {self.name!r}: {field} must be one of {', '.join(map(str, known))}. "
                    f"Got {getattr(self, field)!r}."
                )

    def weighted(
        self, op: Literal["dot", "conv", "depthwise"], *, per_channel: bool = False, wide: bool = False
    ) -> Weighted:
        """How a product with weights becomes codes. wide: whether its activations have 16 bits."""
        choices = [getattr(self, op), self.per_channel if per_channel else None, self.requantize]
        if op == "dot" and per_channel:
            choices.insert(0, self.dot_per_channel)
        if wide:
            choices = [self.wide_dot if op == "dot" else None, self.wide, *choices]
        return next(choice for choice in choices if choice is not None)

    @property
    def powers_of_two(self) -> bool:
        """Whether the runtime only shifts accumulators, so that every scale must be a power of two."""
        chosen = [getattr(self, field) for field in _WEIGHTED]
        return any(get_rule(own.rule).powers_of_two for own in chosen if own is not None)

    def takes(self, spec: QSpec) -> bool:
        """Whether the runtime supports such codes, as far as their width and zero point are concerned."""
        return spec.bits <= 8 or self.wide_zero_points or (spec.signed and spec.symmetric)

    def with_bits(self, spec: QSpec, bits: int) -> QSpec:
        """The same spec with another width, signed and symmetric if the runtime supports no others of that width."""
        wider = spec.replace(bits=bits)
        taken = bits == spec.bits or self.takes(wider)
        return wider if taken else wider.replace(signed=True, symmetric=True, narrow_range=None)

    def formula(self, op: str) -> str | None:
        """The name of the formula of an operation without weights; None means the exact sum."""
        return getattr(self, op)

    def replace(self, **changes: object) -> "Target":
        """A copy with some fields changed; give it a new name."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]


_targets: dict[str, Target] = {}

_C = (
    "A target is the runtime whose rounding the result follows: 'tflite_micro' or 'cmsis_nn' for a microcontroller "
    "with a runtime; for emitted C any target will do."
)
_CPU = (
    "A target is a runtime and not a processor: 'onnxruntime', 'tflite_optimized_x86', 'tflite_xnnpack', "
    "'openvino_cpu' and 'torch_onednn' run on CPUs."
)
_GPU = (
    "No target matches this runtime bit for bit. Use 'nearest_even', the default, and graph.emit('stablehlo', ...) "
    "for XLA on a GPU or TPU, or graph.emit('onnx', ..., style='integer') for any runtime of ONNX files."
)
_PROFILES = {
    **dict.fromkeys(("tensorrt", "trt"), "tensorrt"),
    **dict.fromkeys(("coreml", "core_ml"), "coreml"),
    **dict.fromkeys(("qnn", "snpe", "hexagon"), "qnn_htp"),
    **dict.fromkeys(("edgetpu", "edge_tpu", "coral"), "edge_tpu"),
    "ethos": "ethos_u",
    "tidl": "tidl",
}
"""Devices that have a profile instead of a target; the profiles are in `qjax.profiles`."""

_TFLITE = (
    "Did you mean 'tflite_micro' (microcontrollers), 'tflite_optimized_x86', 'tflite_optimized_arm' or "
    "'tflite_xnnpack' (LiteRT on CPUs)?"
)
_TORCH = "Did you mean 'torch_fbgemm' or 'torch_onednn' (x86), 'torch_qnnpack' (ARM) or 'executorch_xnnpack'?"
_FPGA = "Did you mean 'fpga'? Its files are graph.emit('onnx', ..., style='qonnx') and graph.emit('rtl', ...)."
_WORDS = {
    **dict.fromkeys(("tflite_micro", "tflm", "tfmicro", "tf_micro"), "Did you mean 'tflite_micro'?"),
    **dict.fromkeys(("xnnpack", "openvino", "executorch", "cmsis", "tosa", "neon", "micro", "avx2_"), None),
    **dict.fromkeys(("cortex", "stm32", "esp32", "arduino", "mcu", "riscv", "risc_v", "nrf5", "rp2040", "teensy"), _C),
    **dict.fromkeys(("tflite", "litert", "tensorflow", "lite"), _TFLITE),
    **dict.fromkeys(("hls4ml", "vitis", "vivado", "quartus", "qonnx", "finn", "verilog", "vhdl", "rtl"), _FPGA),
    **dict.fromkeys(("onnx", "ort"), "Did you mean 'onnxruntime'?"),
    **dict.fromkeys(("torch", "fbgemm", "qnnpack", "onednn"), _TORCH),
    **{
        word: f"Such a device has a profile, which states what it demands: Recipe(profile={profile!r})."
        for word, profile in _PROFILES.items()
    },
    **dict.fromkeys(("cuda", "gpu", "tpu"), _GPU),
    **dict.fromkeys(("stablehlo", "xla", "iree", "jax"), _GPU),
    **dict.fromkeys(("cpu", "x86", "arm", "aarch64", "avx", "intel", "amd"), _CPU),
    **dict.fromkeys(
        ("int8", "int4", "uint8", "fp8"), "Bits are set with Recipe(weights=QSpec(bits=...)), not by a target."
    ),
}
"""Words that people use for a target, in the order in which they are tried. None: suggest the nearest name."""


def register(target: Target) -> Target:
    """Make a target known by its name, so that recipes and saved graphs can refer to it.

    Args:
      target: the target. A name stands for one arithmetic, so another target with the same name is an error.

    Examples:
      ```python
      from qjax import targets

      targets.register(targets.get("tflite_micro").replace(name="my_registered_chip"))
      recipe = qjax.Recipe(target="my_registered_chip")
      ```
    """
    if _targets.setdefault(target.name, target) != target:
        raise ValueError(f"Another target is registered under the name {target.name!r}.")
    return target


def get(name: "str | Target") -> Target:
    """The target with that name; a `Target` is returned unchanged.

    Args:
      name: the name of a registered target, or a `Target`.

    Examples:
      >>> from qjax import targets
      >>> targets.get("tflite_micro").requantize
      Weighted(rule='double_round', scale='f64')
    """
    if isinstance(name, Target):
        return name
    if name not in _targets:
        plain = str(name).lower().replace("-", "_")
        near = next((text for word, text in _WORDS.items() if word in plain), None)
        near = did_you_mean(name, names()) if near is None else f" {near}"
        raise ValueError(f"Unknown target {name!r}.{near} Known targets: {', '.join(names())}.")
    return _targets[name]


def names() -> tuple[str, ...]:
    """The names of all registered targets.

    Examples:
      >>> from qjax import targets
      >>> "onnxruntime" in targets.names()
      True
    """
    return tuple(sorted(_targets))
