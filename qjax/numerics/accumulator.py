"""Accumulators: how many bits the sum of a product has, and what happens beyond them.

The sum of K products is stored in a register of limited width. Runtimes treat an overflow in one of three ways:

- `exact`: the register has 32 bits, and the conversion proves from the weights that no input can overflow it. Then the
  order of the additions does not matter. All mainstream runtimes aim at this.
- `wrap`: the sum modulo 2^bits, in two's complement. It does not depend on the order either, because the low bits of a
  sum are those of its terms. A bias, and the multiplier after it, see the wrapped value.
- `saturate`: after *every* addition the register is clamped to [-2^(bits-1), 2^(bits-1) - 1], so the order matters and
  is defined: K ascending, where K runs over the activation's summed axes as they are stored, the last one fastest; for
  a convolution over (row, column, input channel), the channel fastest (`order="hwc"`), or over (input channel, row,
  column) (`"chw"`), each within its group. Products are never truncated, only sums.

`wrap` and `saturate` start from zero; the bias is added to the finished register in int32. What the register sums is
also defined. `operands="centered"`: (code - zero point) * weight, as in A2Q (Colbert, Pappalardo, Petri-Koenig, "A2Q:
Accumulator-Aware Quantization with Guaranteed Overflow Avoidance", 2023), whose bound is a norm of the weights alone,
and as in datapaths that subtract the zero point first. `operands="codes"`: the stored code times the weight, for
hardware that multiplies stored codes and moves the zero point into the bias; that needs more bits unless the zero point
is 0. For a symmetric activation the two are the same.

A fourth way is a flaw of real kernels. `pairs=True` is x86's vpmaddubsw (AVX2, and AVX-512 without VNNI), as FBGEMM,
oneDNN and ONNX Runtime use it: unsigned codes times signed weights, *two neighbouring products added with saturation to
int16*, and these pairs then added exactly in int32. Stored codes are multiplied and the zero point is subtracted
afterwards. A pair is k = 2i and 2i + 1; an odd K ends in a pair with 0. `unit="tap"` starts again at every position of
a convolution's window, so that an odd number of channels ends in a pair with 0 there (oneDNN); `unit="sum"` pairs
across all positions (im2col). `padding="skip"` omits positions outside of the image altogether, including the zero
point's share (oneDNN); `"zero_point"` multiplies them by the code of zero, which is a factor like any other and may
saturate. Signed activations, and codes or weights wider than 8 bits, use other instructions, which are exact, so
`pairs` has no effect there. With uniformly distributed codes and weights 3.6% of the pairs saturate, with weights of
standard deviation 32 one in 8,000. With activations of 7 bits (`Recipe(reduce_range=True)`) no pair can, as 2 * 127 *
128 < 2^15.
"""

import dataclasses
from typing import Any, Literal, cast, get_args

import jax
from jax import lax

Overflow = Literal["exact", "wrap", "saturate"]
Operands = Literal["centered", "codes"]
Order = Literal["hwc", "chw"]
Unit = Literal["sum", "tap"]
Padding = Literal["zero_point", "skip"]

PAIR_MIN, PAIR_MAX = -(2**15), 2**15 - 1
"""The range to which vpmaddubsw saturates a sum of two products."""

_CHOICES = {"overflow": Overflow, "operands": Operands, "order": Order, "unit": Unit, "padding": Padding}


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """The register in which a sum of products is stored; see the module's docstring. Hashable.

    Args:
      bits: its width, 2 to 32, including the sign.
      overflow: "exact" (needs 32 bits), "wrap" or "saturate".
      pairs: whether products are first added in saturating int16 pairs (needs "exact").
      operands: what wraps or saturates, sums of centered codes or of stored ones; pairs always multiply stored codes.
      order: of a convolution's K, for "saturate" and pairs.
      unit, padding: pairs only: where pairing starts again, and how positions outside of the image count.

    Examples:
      >>> from qjax import numerics, targets
      >>> register = numerics.Accumulator(bits=16, overflow="saturate")
      >>> narrow = targets.get("tflite_micro").replace(name="narrow_chip", accumulator=register)
    """

    bits: int = 32
    overflow: Overflow = "exact"
    pairs: bool = False
    operands: Operands = "centered"
    order: Order = "hwc"
    unit: Unit = "sum"
    padding: Padding = "zero_point"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 32:
            raise ValueError(f"Accumulator: bits must be an integer in 2..32. Got {self.bits!r}.")
        if type(self.pairs) is not bool:
            raise TypeError(f"Accumulator: pairs must be True or False. Got {self.pairs!r}.")
        for field, literal in _CHOICES.items():
            value, known = getattr(self, field), get_args(literal)
            if value not in known:
                raise ValueError(f"Accumulator: {field} must be one of {', '.join(map(repr, known))}. Got {value!r}.")
        if self.overflow == "exact" and self.bits != 32:
            raise ValueError(
                f"Accumulator: overflow='exact' needs 32 bits. Got bits={self.bits}: choose what happens "
                "beyond them with overflow='wrap' or 'saturate'."
            )
        if self.pairs and self.overflow != "exact":
            raise ValueError(
                f"Accumulator: int16 pairs are summed in exact 32 bits. Got overflow={self.overflow!r}; drop it, or "
                "drop pairs."
            )
        if self.operands != "centered" and self.overflow == "exact":
            raise ValueError(
                "Accumulator: operands only apply to overflow='wrap' and 'saturate'; drop operands='codes'."
            )
        if self.order != "hwc" and not self.ordered:
            raise ValueError(
                f"Accumulator: overflow={self.overflow!r} without pairs does not depend on the order; drop "
                f"order={self.order!r}."
            )
        if not self.pairs and (self.unit != "sum" or self.padding != "zero_point"):
            raise ValueError("Accumulator: unit and padding only apply to pairs=True; drop them.")
        if self.unit == "tap" and self.order != "hwc":
            raise ValueError(
                "Accumulator: unit='tap' pairs the channels of one tap, which are no neighbours in order='chw'; use "
                "'hwc'."
            )

    @property
    def low(self) -> int:
        """The least value of the register."""
        return -(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        """The greatest value of the register."""
        return 2 ** (self.bits - 1) - 1

    @property
    def ordered(self) -> bool:
        """Whether the result depends on the order of the products."""
        return self.pairs or self.overflow == "saturate"

    def on(self, codes: str, weights: str) -> "Accumulator":
        """This accumulator for operands stored in these dtypes: exact if int16 pairs do not apply to them."""
        return EXACT if self.pairs and (codes, weights) != ("uint8", "int8") else self

    def to_json(self) -> list[list[Any]]:
        """[field, value] for every field: the attribute "accumulator" of a graph's node, absent where it is `EXACT`."""
        return [[field.name, getattr(self, field.name)] for field in dataclasses.fields(self)]

    @classmethod
    def of_json(cls, value: Any) -> "Accumulator":
        """The inverse; None is `EXACT`. Raises ValueError or TypeError for anything that `to_json` cannot write."""
        if value is None:
            return EXACT
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"accumulator: expected a list of [field, value], got {type(value).__name__}.")
        known = [field.name for field in dataclasses.fields(cls)]
        items = cast("list[Any]", value)
        fields: dict[str, Any] = {}
        for item in items:
            if isinstance(item, (list, tuple)) and len(cast("list[Any]", item)) == 2 and type(item[0]) is str:
                fields[item[0]] = item[1]
        if len(items) != len(known) or set(fields) != set(known):
            raise ValueError(f"accumulator: expected [field, value] for {', '.join(known)}; got {str(items)[:200]}.")
        return cls(**fields)

    def __str__(self) -> str:
        if self.pairs:
            text = "int16 pairs"
        else:
            text = f"{self.bits}" if self.overflow == "exact" else f"{self.bits} {self.overflow}"
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                text += f", {field.name} {value}"
        return text


EXACT = Accumulator()
"""32 bits; the conversion proves that no input can overflow it."""


def bits_for(low: int, high: int) -> int:
    """The bits, including the sign, of the narrowest two's complement register for every integer in [low, high]."""
    return 1 + max(high.bit_length() if high > 0 else 0, (-low - 1).bit_length() if low < 0 else 0)


def wrap(total: jax.Array, bits: int) -> jax.Array:
    """int32 -> int32: the low `bits` of `total`, their highest one repeated as the sign."""
    shift = lax.full_like(total, 32 - bits)
    return lax.shift_right_arithmetic(lax.shift_left(total, shift), shift)
