"""Weight formats: NF4, FP8, MX and NVFP4, whose values are not evenly spaced; the blocks of GGUF files; and few levels.

A weight is `values[code] * scale`, with one scale for each group of consecutive weights along the summed axis.

| format | values | scale of a group | group | source |
| --- | --- | --- | --- | --- |
| `nf4` | 16 normal quantiles | float32, the greatest magnitude | 64 | arXiv 2305.14314, appendix E |
| `fp8_e4m3`, `fp8_e5m2` | E4M3, E5M2 | float32, the greatest magnitude / 448, 57344 | channel | arXiv 2209.05433 |
| `mxfp4` | E2M1 | E8M0, 2^(floor(log2 greatest) - emax) | 32 | OCP Microscaling Formats 1.0, 5 and 6.3 |
| `mxfp8_e4m3`, `mxfp8_e5m2` | E4M3, E5M2 | the same | 32 | the same |
| `nvfp4` | E2M1 | E4M3 of greatest / 6, times one float32 for the tensor | 16 | NVIDIA, "Introducing NVFP4" |
| `ternary` | -1, 0, 1 | mean magnitude | tensor | arXiv 2402.17764, equations 1 to 3 |
| `binary` | -1, 1 | mean magnitude | tensor | arXiv 1603.05279, section 3.1 |
| `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0` | integers | float16, and a minimum | 32 | `numerics.block_formats` |
| `q2_k` to `q6_k` | integers | an integer times a float16, and a minimum | 16, 32 | `numerics.k_formats` |

Floats are rounded to the nearest value, ties to the even code, and saturate; their codes are the bits of the format, as
in `ml_dtypes`. NF4 rounds ties down. A group of zeros has the scale 1, and so does one whose scale would be a subnormal
float32, because XLA and numpy differ there.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.block_formats import BLOCK_FORMATS, BlockFormat, decode_blocks, encode_blocks, scales_and_minimums
from qjax.numerics.dynamic import divided
from qjax.numerics.qparams import SCALE_MAX, SCALE_MIN
from qjax.numerics.qspec import known_fields
from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused
from qjax.support.names import did_you_mean

_TINY = np.float32(2.0**-126)


def _floats(exponent: int, mantissa: int, bias: int, count: int) -> np.ndarray:
    """The values of the codes 0 to count - 1 of a float format with subnormal numbers."""
    code = np.arange(count)
    field, rest = code >> mantissa, code & (2**mantissa - 1)
    whole = np.where(field > 0, 2**mantissa + rest, rest).astype(np.float64)
    return np.ldexp(whole, np.maximum(field, 1) - bias - mantissa).astype(np.float32)


_E2M1, _E4M3, _E5M2 = _floats(2, 1, 1, 8), _floats(4, 3, 7, 127), _floats(5, 2, 15, 124)
_NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kind:
    """One format.

    magnitudes: of a float's codes without the sign; None: other codes. sign: the bit of the sign. group: its size, None
    for a scale per channel, 0 for one per tensor. scale: computes those of groups along the last axis.
    """

    magnitudes: np.ndarray | None
    sign: int
    group: int | None
    scale: Callable[..., jax.Array]


def _per_channel(w: jax.Array, kind: _Kind) -> jax.Array:
    assert kind.magnitudes is not None
    return _usable(divided(jnp.max(jnp.abs(w), -1, keepdims=True), kind.magnitudes[-1]))


def _largest(w: jax.Array, kind: _Kind) -> jax.Array:
    return _usable(jnp.max(jnp.abs(w), -1, keepdims=True))


def _power_of_two(w: jax.Array, kind: _Kind) -> jax.Array:
    """The power of two is found by bits, so it is exact; XLA's log2 is off by an ulp for some inputs."""
    assert kind.magnitudes is not None
    largest = jnp.max(jnp.abs(w), -1, keepdims=True)
    emax = int(np.floor(np.log2(kind.magnitudes[-1])))
    field = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - np.int32(emax)
    scale = lax.bitcast_convert_type(jnp.clip(field, np.int32(1), np.int32(254)) << 23, jnp.float32)
    return jnp.where(largest >= _TINY, scale, jnp.ones_like(scale))


def _two_levels(w: jax.Array, kind: _Kind) -> jax.Array:
    largest = jnp.max(jnp.abs(w), -1, keepdims=True)
    whole = _usable(divided(jnp.max(largest), np.float32(448 * 6)))
    own = divided(largest, np.float32(6))
    code = _code_of(divided(own, jnp.broadcast_to(whole, own.shape)), _E4M3)
    return unfused(jnp.asarray(_E4M3)[code] * whole)


def mean_magnitude(w: jax.Array) -> jax.Array:
    """float32 mean of |w|, with the same bits in eager mode and under jit: pairs are added, then pairs of pairs.

    XLA chooses the order of `jnp.mean`. Here each level is one elementwise sum, whose order is fixed.
    """
    flat = jnp.abs(lax.stop_gradient(w).astype(jnp.float32)).reshape(-1)
    size = flat.size
    total = jnp.pad(flat, (0, 2 ** max(size - 1, 0).bit_length() - size))
    while total.size > 1:
        half = total.size // 2
        total = total[:half] + total[half:]
    return _usable(divided(total.reshape(()), np.float32(max(size, 1))))


def _mean(w: jax.Array, kind: _Kind) -> jax.Array:
    return mean_magnitude(w).reshape((1,) * w.ndim)


def _usable(scale: jax.Array) -> jax.Array:
    return jnp.where(scale >= np.float32(SCALE_MIN), jnp.minimum(scale, np.float32(SCALE_MAX)), np.float32(1))


_KINDS = {
    "nf4": _Kind(None, 0, 64, _largest),
    "fp8_e4m3": _Kind(_E4M3, 128, None, _per_channel),
    "fp8_e5m2": _Kind(_E5M2, 128, None, _per_channel),
    "mxfp4": _Kind(_E2M1, 8, 32, _power_of_two),
    "mxfp8_e4m3": _Kind(_E4M3, 128, 32, _power_of_two),
    "mxfp8_e5m2": _Kind(_E5M2, 128, 32, _power_of_two),
    "nvfp4": _Kind(_E2M1, 8, 16, _two_levels),
    "ternary": _Kind(None, 0, 0, _mean),
    "binary": _Kind(None, 0, 0, _mean),
}
INTEGERS = ("ternary", "binary")
"""The formats whose codes are the values, but for one scale."""

_GROUPS = {name: kind.group for name, kind in _KINDS.items()} | {name: k.block for name, k in BLOCK_FORMATS.items()}
"""Format -> the size of its groups; None for a scale per channel, 0 for one per tensor."""


@known_fields(
    {
        "bits": 'The name states the bits: WeightFormat("nf4"). Integers of a few bits are QSpec(bits=4, axis=-1).',
    }
)
@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """An override: the weights of a module's products are stored in a format such as NF4, FP8 or MXFP4.

    Everything else in the module is float, as under `FLOAT`. The graph holds codes and scales, and dequantizes exactly
    before it multiplies. In training the gradient goes straight through to the weight.

    Args:
      name: nf4, fp8_e4m3, fp8_e5m2, mxfp4, mxfp8_e4m3, mxfp8_e5m2, nvfp4, ternary, binary, or a block format of GGUF
        files: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k.
      group_size: how many weights along the summed axis share a scale. None means the format's own number. Formats with
        a scale per channel or tensor take no group size, and neither do those of GGUF files, with blocks of 32 or 16.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(overrides={"blocks/.*": qjax.WeightFormat("nf4", group_size=64)})
    """

    name: str
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.name not in _GROUPS:
            near = did_you_mean(self.name, _GROUPS)
            raise ValueError(f"WeightFormat: expected one of {', '.join(_GROUPS)}, got {self.name!r}.{near}")
        if self.group_size is None:
            return
        own = _GROUPS[self.name]
        if self.blocks is not None:
            raise ValueError(f"WeightFormat: {self.name} has blocks of {own}. Leave group_size out.")
        if not own:
            shared = "channel" if own is None else "tensor"
            raise ValueError(f"WeightFormat: {self.name} has one scale per {shared}. Leave group_size out.")
        if type(self.group_size) is not int or self.group_size < 1:
            raise ValueError(
                f"WeightFormat: group_size: expected a whole number of at least 1, got {self.group_size!r}."
            )

    @property
    def group(self) -> int | None:
        """How many weights along the summed axis share a scale; None: all of them."""
        return self.group_size or _GROUPS[self.name] or None

    @property
    def whole(self) -> int | None:
        """Of how many weights a sum must have a multiple: the group, or for K formats 256; None: any number."""
        return self.group if self.blocks is None else self.blocks.whole

    @property
    def blocks(self) -> BlockFormat | None:
        """The block format of GGUF files; None for any other format."""
        return BLOCK_FORMATS.get(self.name)

    @property
    def is_integer(self) -> bool:
        """Whether the codes, in int8, are the values themselves, but for one scale."""
        return self.name in INTEGERS

    @property
    def has_integer_codes(self) -> bool:
        """Whether the codes are integers, so that products with int8 codes are sums of integers."""
        return self.is_integer or self.blocks is not None

    @property
    def code_range(self) -> tuple[int, int]:
        """Bits of a code in memory, and the lowest code."""
        if self.blocks is not None:
            return self.blocks.bits, self.blocks.lowest
        return (2, -1) if self.is_integer else ((len(self.values) - 1).bit_length(), 0)

    @property
    def qmax(self) -> int:
        """The greatest magnitude of the codes of a format with integer codes."""
        return 1 if self.blocks is None else self.blocks.qmax

    @property
    def values(self) -> np.ndarray:
        """float32: the value of each code of a float format; 0 for codes that no weight gets (NaN, infinity)."""
        kind = _KINDS[self.name]
        if kind.magnitudes is None:
            return _NF4
        table = np.zeros(2 * kind.sign, np.float32)
        table[: len(kind.magnitudes)] = kind.magnitudes
        table[kind.sign : kind.sign + len(kind.magnitudes)] = -kind.magnitudes
        return table

    def __str__(self) -> str:
        return self.name if self.group_size is None else f"{self.name} in groups of {self.group_size}"


def encode(w: jax.Array, format: WeightFormat) -> list[jax.Array]:
    """Codes of a weight whose last axis is summed (uint8, or int8 for integer codes), float32 scales, and minimums.

    Args:
      w: float32.

    Returns:
      codes: of w's shape. scales: of w's rank, with the number of groups along the last axis; all 1 if per tensor.
      Formats with minimums return these too, in the shape of the scales.

    Raises:
      ValueError: groups that do not divide the last axis.
    """
    codes, *rest = encode_stored(w, format)
    return [codes, *(rest if format.blocks is None else scales_and_minimums(rest, format.blocks))]


def encode_stored(w: jax.Array, format: WeightFormat) -> list[jax.Array]:
    """The same, but with what a file stores: K formats have scales in two parts, see `encode_blocks`."""
    if format.whole is not None and w.shape[-1] % format.whole:
        cure = "another group_size" if format.blocks is None else "another format for this module, or qjax.FLOAT"
        raise ValueError(
            f"{format}: expected groups that divide the {w.shape[-1]} weights of a sum, got groups of {format.whole}. "
            f"Choose {cure}."
        )
    size = format.group
    view = w if size is None else w.reshape(*w.shape[:-1], w.shape[-1] // size, size)
    if format.blocks is not None:
        codes, *stored = encode_blocks(view, format.blocks)
        return [codes.reshape(w.shape), *stored]
    kind = _KINDS[format.name]
    scale = kind.scale(view, kind)
    # a group whose scale rounds to 0 has the codes of 0
    divisor = jnp.where(scale > 0, scale, jnp.full_like(scale, np.inf))
    x = divided(view, jnp.broadcast_to(divisor, view.shape))
    if format.name == "binary":
        codes = jnp.where(x < 0, -1, 1).astype(jnp.int8)
    elif format.name == "ternary":
        codes = jnp.clip(round_float(x, Rounding.NEAREST_EVEN), -1, 1).astype(jnp.int8)
    elif kind.magnitudes is None:
        middle = (_NF4[1:].astype(np.float64) + _NF4[:-1]) / 2
        codes = jnp.searchsorted(jnp.asarray(_above(middle)), x, side="right", method="compare_all").astype(jnp.uint8)
    else:
        sign = jnp.where(jnp.signbit(view), np.uint8(kind.sign), np.uint8(0))
        codes = sign + _code_of(jnp.abs(x), kind.magnitudes).astype(jnp.uint8)
    return [codes.reshape(w.shape), scale if size is None else scale.reshape(view.shape[:-1])]


def decode(parts: Sequence[jax.Array], format: WeightFormat) -> jax.Array:
    """float32 values of what `encode` returns: `values[code] * scale`, rounded once, plus the minimum if any."""
    codes, *rest = parts
    if format.group is not None:
        rest = [jnp.broadcast_to(p[..., None], (*p.shape, format.group)).reshape(codes.shape) for p in rest]
    rest = [jnp.broadcast_to(part, codes.shape) for part in rest]
    if format.blocks is not None:
        return decode_blocks(codes, *rest)
    real = codes.astype(jnp.float32) if format.is_integer else jnp.take(jnp.asarray(format.values), codes, mode="clip")
    return unfused(real * rest[0])


def _code_of(x: jax.Array, magnitudes: np.ndarray) -> jax.Array:
    """The code of the nearest magnitude, ties to the even one; greater numbers get the last one."""
    middle = (magnitudes[1:].astype(np.float64) + magnitudes[:-1]) / 2
    # between an even code and the next one the tie rounds down, so the number must be greater than the middle
    even = np.arange(len(middle)) % 2 == 0
    bounds = np.where(even, _above(middle), middle.astype(np.float32))
    return jnp.searchsorted(jnp.asarray(bounds), x, side="right").astype(jnp.int32)


def _above(middle: np.ndarray) -> np.ndarray:
    """The lowest float32 above each number."""
    near = middle.astype(np.float32)
    return np.where(near.astype(np.float64) > middle, near, np.nextafter(near, np.float32(np.inf)))
