"""Rules: the requirements of a device for an operator, each with its source and a cure.

A rule's test examines one operator and returns the offending fact, or None if nothing is wrong. The functions below
make rules from numbers; a profile is a list of such calls.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from qjax.contrib.profiles.operators import Operator, Tensor

Test = Callable[[Operator], str | None]


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a rule: a vendor's page or code, with its version.

    Args:
      text: the page or file, and its version.
      url: its address.
      verified: whether the text was read in that version. Unverified sources are marked wherever they are shown.

    Examples:
      >>> from qjax import profiles
      >>> source = profiles.Source("data sheet, version 3", "https://example.com", verified=False)
    """

    text: str
    url: str
    verified: bool = True

    def __str__(self) -> str:
        return self.text if self.verified else f"{self.text} (not verified)"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One requirement.

    Args:
      name: short, for tables.
      expected: the requirement in words.
      cure: what to do about a violation.
      source: where the vendor documents it.
      test: (operator) -> the offending fact, or None if the rule holds.
      only: the operators to which it applies; empty means all.
      numbers: whether it depends on trained values, so that it cannot be checked before training ends.
      scheme: whether it is about bits, signs and zero points, which `Scheme` checks on the recipe already.

    Examples:
      >>> from qjax import profiles
      >>> rule = profiles.Rule(
      ...     "small batches",
      ...     expected="a batch of 1",
      ...     cure="Convert with a sample of one example and batch='fixed'.",
      ...     source=profiles.Source("data sheet, version 3", "https://example.com"),
      ...     test=lambda operator: (
      ...         None if operator.outputs[0].shape[0] == 1 else "another batch"
      ...     ),
      ... )
    """

    name: str
    expected: str
    cure: str
    source: Source
    test: Test
    only: frozenset[str] = frozenset()
    numbers: bool = False
    scheme: bool = False

    def came(self, operator: Operator) -> str | None:
        """What is wrong with an operator, or None."""
        return self.test(operator) if not self.only or operator.name in self.only else None


def _first(found: list[str]) -> str | None:
    return None if not found else found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1} more like it"


# ---------------------------------------------------------------------------- schemes


def activations(
    dtypes: Collection[str],
    source: Source,
    *,
    symmetric: bool = False,
    only: Collection[str] = (),
    indices: Collection[str] = (),
    cure: str,
) -> Rule:
    """Activations have one scale per tensor, and codes of those dtypes.

    symmetric: with zero point 0. indices: the operators whose outputs are indices, without a scale.
    """

    def test(operator: Operator) -> str | None:
        looked = operator.read if operator.name in indices else operator.activations
        return _first([f"{t.name!r}: {w}" for t in looked if (w := _wrong(t, dtypes, symmetric))])

    zero = ", zero point 0" if symmetric else ""
    expected = f"activations of {' or '.join(sorted(dtypes))}, one scale per tensor{zero}"
    return Rule("activations", expected, cure, source, test, frozenset(only), scheme=True)


def _wrong(tensor: Tensor, dtypes: Collection[str], symmetric: bool) -> str | None:
    if tensor.dtype not in dtypes:
        return tensor.dtype
    if tensor.scale is None or tensor.zero_point is None:
        return f"{tensor.dtype} without a scale"
    if tensor.scale.size != 1:
        return f"{tensor.scale.size} scales"
    if symmetric and np.any(tensor.zero_point):
        return f"zero point {int(tensor.zero_point.reshape(-1)[0])}"
    return None


def weights(
    dtypes: Collection[str],
    source: Source,
    *,
    symmetric: bool = True,
    least: int | None = None,
    per_channel: Collection[str] | None = None,
    only: Collection[str] = (),
    cure: str,
) -> Rule:
    """Weights are constants of those dtypes.

    symmetric: with zero point 0. least: the least code. per_channel: the operators whose weights may have a scale per
    output channel; None means all.
    """

    def test(operator: Operator) -> str | None:
        tensor = operator.weights
        if tensor is None:
            return None
        if not tensor.constant or tensor.data is None:
            return f"{tensor.name!r} is computed"
        if tensor.dtype not in dtypes:
            return f"{tensor.name!r} of {tensor.dtype}"
        if tensor.scale is None or tensor.zero_point is None:
            return f"{tensor.name!r} without a scale"
        if tensor.blocks:
            return f"{tensor.name!r} with scales of blocks"
        if symmetric and np.any(tensor.zero_point):
            return f"{tensor.name!r} with the zero point {int(tensor.zero_point.reshape(-1)[0])}"
        if per_channel is not None and tensor.scale.size > 1 and operator.name not in per_channel:
            return f"{tensor.name!r} with {tensor.scale.size} scales"
        if least is not None and tensor.data().min(initial=0) < least:
            return f"{tensor.name!r} with the code {int(tensor.data().min())}"
        return None

    parts = [f"constant weights of {' or '.join(sorted(dtypes))}"]
    parts += ["zero point 0"] if symmetric else []
    parts += [] if least is None else [f"no code below {least}"]
    if per_channel is not None:
        parts.append(f"a scale per channel only in {', '.join(sorted(per_channel))}" if per_channel else "one scale")
    return Rule("weights", ", ".join(parts), cure, source, test, frozenset(only), scheme=True)


def bias(dtypes: Collection[str], source: Source, *, cure: str) -> Rule:
    """A bias has one of those dtypes; its codes have the scale of the input times that of the weights."""

    def test(operator: Operator) -> str | None:
        tensor, first = operator.biases, operator.inputs[0] if operator.inputs else None
        if tensor is not None and tensor.dtype == "float32" and first is not None and first.dtype == "float32":
            # A product of floats has a bias of floats.
            return None
        if tensor is None or tensor.dtype in dtypes:
            return None if tensor is None or tensor.dtype == "float32" else _bias_scale(operator, tensor)
        return f"{tensor.name!r} of {tensor.dtype}"

    expected = f"a bias of {' or '.join(sorted(dtypes))}"
    expected += ", codes with the scale s_input * s_weight" if "int32" in dtypes else ""
    return Rule("bias", expected, cure, source, test)


def _bias_scale(operator: Operator, tensor: Tensor) -> str | None:
    x, w = operator.read[0], operator.weights
    if tensor.scale is None or x.scale is None or w is None or w.scale is None or not tensor.scale.size:
        return f"{tensor.name!r} without a scale"
    wanted = np.float64(x.scale.reshape(-1)[0]) * w.scale.astype(np.float64).reshape(-1)
    given = tensor.scale.astype(np.float64).reshape(-1)
    # Tools compute the product in float32 or in double, so allow one step of float32.
    near = given.size in (1, wanted.size) and np.all(np.abs(given - wanted) <= 2.0**-23 * np.abs(wanted))
    return None if near else f"{tensor.name!r} with a different scale"


def power_of_two(source: Source, *, cure: str) -> Rule:
    """Every scale is a power of two."""

    def test(operator: Operator) -> str | None:
        found = [t for t in operator.tensors if t.scale is not None and np.any(np.frexp(t.scale)[0] != 0.5)]
        return _first([f"{tensor.name!r}: {tensor.grid}" for tensor in found])

    return Rule("powers of two", "scales that are powers of two", cure, source, test)


def fixed_grid(operators: Collection[str], dtype: str, scale: float, zero_point: int, source: Source) -> Rule:
    """Outputs of a dtype have that scale and zero point."""

    def test(operator: Operator) -> str | None:
        for tensor in operator.outputs:
            if tensor.dtype != dtype or tensor.scale is None or tensor.zero_point is None:
                continue
            if np.any(tensor.scale != np.float32(scale)) or np.any(tensor.zero_point != zero_point):
                return f"{tensor.name!r} with {tensor.grid}"
        return None

    expected = f"{dtype} outputs with scale {scale:.6g} and zero point {zero_point}"
    cure = "Convert for a target whose functions have these scales, or quantize this function to 8 bits."
    return Rule("fixed scale", expected, cure, source, test, frozenset(operators))


# ---------------------------------------------------------------------------- grids of several tensors


def same_grid(operators: Collection[str], source: Source, *, cure: str, outputs: bool = False) -> Rule:
    """All inputs have the same scale and zero point; outputs: the output has them too."""

    def test(operator: Operator) -> str | None:
        tensors = operator.activations if outputs else operator.read
        other = next((t for t in tensors[1:] if not t.same_grid(tensors[0])), None) if tensors else None
        if other is None:
            return None
        return f"{tensors[0].name!r} with {tensors[0].grid}, {other.name!r} with {other.grid}"

    expected = f"inputs{' and output' if outputs else ''} with the same scale and zero point"
    return Rule("same scale", expected, cure, source, test, frozenset(operators))


def narrow_second(operators: Collection[str], source: Source, *, cure: str) -> Rule:
    """If the first input has 16 bits, the second has 8."""

    def test(operator: Operator) -> str | None:
        first, second, *_ = (*operator.inputs, None, None)
        wide = first is not None and second is not None and "16" in first.dtype and "16" in second.dtype
        return f"{second.name!r} of {second.dtype}" if wide and second is not None else None

    return Rule("second input", "8 bits in the second input if the first has 16", cure, source, test, _set(operators))


def _set(names: Collection[str]) -> frozenset[str]:
    return frozenset(names)


# ---------------------------------------------------------------------------- shapes


def rank(most: int, source: Source, *, only: Collection[str] = (), used: bool = False) -> Rule:
    """Tensors have at most that many dimensions; used: without those of size 1."""

    def test(operator: Operator) -> str | None:
        for tensor in operator.activations:
            count = sum(n != 1 for n in tensor.shape) if used else len(tensor.shape)
            if count > most:
                return f"{tensor.name!r} of shape {_shape(tensor)}"
        return None

    what = f"at most {most} dimensions{' other than 1' if used else ''}"
    return Rule("rank", what, "Reshape before this operation.", source, test, _set(only))


def dimensions(most: int, source: Source) -> Rule:
    """Axes have sizes from 1 to that number."""

    def test(operator: Operator) -> str | None:
        bad = [t for t in operator.tensors if any(n is not None and not 1 <= n <= most for n in t.shape)]
        return _first([f"{t.name!r} of shape {_shape(t)}" for t in bad])

    return Rule("sizes", f"axes of 1 to {most:,}", "Split the tensor.", source, test)


def batch_of_one(source: Source, *, only: Collection[str] = (), without: Collection[str] = ()) -> Rule:
    """The first of four axes has size 1."""

    def test(operator: Operator) -> str | None:
        if operator.name in without:
            return None
        bad = [t for t in operator.read if len(t.shape) >= 4 and t.shape[0] not in (1, None)]
        return _first([f"{t.name!r} of shape {_shape(t)}" for t in bad])

    return Rule("batch", "a batch of one", "Emit with batch=1.", source, test, _set(only))


def innermost(most: int, source: Source) -> Rule:
    """Only that many innermost axes are larger than 1."""

    def test(operator: Operator) -> str | None:
        bad = [t for t in operator.activations if any(n not in (1, None) for n in t.shape[:-most])]
        return _first([f"{t.name!r} of shape {_shape(t)}" for t in bad])

    expected = f"sizes above 1 only in the {most} innermost axes"
    return Rule("inner axes", expected, "Emit with batch=1, and reshape before this operation.", source, test)


def static(source: Source) -> Rule:
    """No size is free, except for the batch."""

    def test(operator: Operator) -> str | None:
        bad = [t for t in operator.activations if None in t.shape[1:]]
        return _first([f"{t.name!r} of shape {_shape(t)}" for t in bad])

    return Rule("static shapes", "fixed sizes, except for the batch", "Emit with batch=1.", source, test)


def _shape(tensor: Tensor) -> str:
    return "x".join("?" if n is None else str(n) for n in tensor.shape) or "scalar"


# ---------------------------------------------------------------------------- windows


@dataclasses.dataclass(frozen=True)
class Window:
    """The window of a convolution or a pool. height, width: of the dilated kernel."""

    height: int
    width: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padded: bool


def window(
    only: Collection[str], expected: str, source: Source, allowed: Callable[[Window, Operator], bool], *, cure: str
) -> Rule:
    """A condition on windows. allowed: whether the device supports one."""

    def test(operator: Operator) -> str | None:
        found = window_of(operator)
        if found is None or allowed(found, operator):
            return None
        strides, dilated = "x".join(map(str, found.strides)), "x".join(map(str, found.dilations))
        return f"a kernel of {found.height}x{found.width} (dilated by {dilated}), strides {strides}"

    return Rule("window", expected, cure, source, test, _set(only))


def window_of(operator: Operator) -> Window | None:
    """The window of an operator of TFLite or ONNX; None if it has no two-dimensional window."""
    options: Any = operator.options
    if "stride_w" in options:
        strides = int(options["stride_h"]), int(options["stride_w"])
        dilations = int(options.get("dilation_h", 1)), int(options.get("dilation_w", 1))
        shape = operator.weights.shape[1:3] if operator.weights is not None else ()
        size = (options["filter_h"], options["filter_w"]) if "filter_h" in options else shape
        padded = options.get("padding") == 0
    else:
        shape = operator.weights.shape[2:] if operator.weights is not None else ()
        size = options.get("kernel_shape", shape)
        strides = tuple(options.get("strides", (1,) * len(size)))
        dilations = tuple(options.get("dilations", (1,) * len(size)))
        padded = any(options.get("pads", ()))
    if len(size) != 2:
        return None
    area = [(int(n or 1) - 1) * d + 1 for n, d in zip(size, dilations, strict=True)]
    return Window(area[0], area[1], strides, dilations, padded)


def weight_sum(only: Collection[str], most: int, source: Source) -> Rule:
    """The sum of absolute weights of every output channel has an upper bound."""

    def test(operator: Operator) -> str | None:
        tensor = operator.weights
        if tensor is None or tensor.data is None or not tensor.shape:
            return None
        codes = np.abs(tensor.data().astype(np.int64))
        channel = tensor.axis if tensor.axis is not None else 0
        sums = codes.sum(axis=tuple(i for i in range(codes.ndim) if i != channel))
        worst = int(np.max(sums, initial=0))
        return f"{worst:,} in {tensor.name!r}" if worst > most else None

    expected = f"a sum of absolute weights of at most {most:,} for every output channel"
    cure = "Split the layer along its input channels, or use fewer bits for its weights."
    return Rule("sum of weights", expected, cure, source, test, _set(only), numbers=True)


# ---------------------------------------------------------------------------- anything else


def demand(name: str, expected: str, source: Source, came: Test, *, cure: str, only: Collection[str] = ()) -> Rule:
    """A rule with a test of its own."""
    return Rule(name, expected, cure, source, came, _set(only))


def floats_between(source: Source) -> Rule:
    """Every operator is between DequantizeLinear and QuantizeLinear; none works on codes."""

    def test(operator: Operator) -> str | None:
        return "an operator on codes" if operator.on_codes else None

    cure = "Emit with style='qdq' and portable='floats'."
    return Rule("float operators", "operators between DequantizeLinear and QuantizeLinear", cure, source, test)


def elements(tensor: Tensor) -> int:
    """The number of elements per example."""
    return math.prod(n or 1 for n in tensor.shape)
