"""The requirements of a device for a recipe's specs, which are checked before there is any graph."""

import dataclasses
from collections.abc import Iterator

from qjax.contrib.profiles.rules import Source
from qjax.numerics.qspec import QSpec


@dataclasses.dataclass(frozen=True)
class Specs:
    """The specs that are allowed.

    Args:
      dtypes: of the codes.
      bits: the allowed widths.
      symmetric: True: only symmetric ones; None: both.
      narrow: whether signed symmetric ones must leave out the lowest code.
      per_channel: whether a tensor may have a scale per channel.

    Examples:
      >>> from qjax import profiles
      >>> allowed = profiles.Specs(frozenset({"int8"}), frozenset({8}), symmetric=True)
    """

    dtypes: frozenset[str]
    bits: frozenset[int]
    symmetric: bool | None = None
    narrow: bool = False
    per_channel: bool = False

    def wrong(self, spec: QSpec) -> Iterator[str]:
        """Yield what is not allowed about a spec: what was expected, and what came."""
        if spec.bits not in self.bits:
            yield f"expected {_join_values(self.bits)} bits, got {spec.bits}"
        elif spec.dtype.name not in self.dtypes:
            yield f"expected codes of {_join_values(self.dtypes)}, got {spec.dtype.name}"
        if self.symmetric and not spec.symmetric:
            yield "expected symmetric codes (zero point 0), got symmetric=False"
        if self.narrow and spec.symmetric and spec.signed and not spec.narrow_range:
            yield f"expected codes from {-spec.qmax} to {spec.qmax}, got narrow_range=False"
        if spec.group_size is not None:
            yield f"expected no groups of scales, got group_size={spec.group_size}"
        elif spec.axis is not None and not self.per_channel:
            yield f"expected one scale per tensor, got axis={spec.axis}"

    @property
    def text(self) -> str:
        """The allowed specs in words."""
        parts = [f"{_join_values(self.bits)} bits ({_join_values(self.dtypes)})"]
        parts += ["symmetric"] if self.symmetric else ["symmetric or not"]
        parts += ["without the lowest code"] if self.narrow else []
        return ", ".join([*parts, "per channel or per tensor" if self.per_channel else "per tensor"])


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The allowed specs of weights and of activations.

    Args:
      weights: the specs that weights may have.
      activations: the specs that activations may have.
      source: where the vendor documents it.

    Examples:
      >>> from qjax import profiles
      >>> source = profiles.Source("data sheet, version 3", "https://example.com")
      >>> scheme = profiles.Scheme(
      ...     profiles.specs("int8", symmetric=True, per_channel=True),
      ...     profiles.specs("int8"),
      ...     source,
      ... )
    """

    weights: Specs
    activations: Specs
    source: Source


def specs(
    dtypes: str,
    bits: tuple[int, ...] = (8,),
    *,
    symmetric: bool | None = None,
    narrow: bool = False,
    per_channel: bool = False,
) -> Specs:
    """`Specs` with the dtypes in one string.

    Args:
      dtypes: of the codes, separated by spaces.
      bits: the allowed widths of a code.
      symmetric: True allows only symmetric ones, None both.
      narrow: whether signed symmetric ones must leave out the lowest code.
      per_channel: whether a tensor may have a scale per channel.

    Examples:
      >>> from qjax import profiles
      >>> profiles.specs("int8 uint8", (4, 8)).bits == {4, 8}
      True
    """
    return Specs(frozenset(dtypes.split()), frozenset(bits), symmetric, narrow, per_channel)


def _join_values(values: frozenset[int] | frozenset[str]) -> str:
    return " or ".join(str(value) for value in sorted(values, key=str))
