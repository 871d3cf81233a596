"""Accumulators: how wide a sum of products is, and what happens beyond its width."""

import dataclasses
from typing import Literal

Overflow = Literal["exact", "wrap", "saturate"]


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """The register that a sum of products lives in."""

    bits: int = 32
    overflow: Overflow = "exact"
    pairs: bool = False


EXACT = Accumulator()
"""32 bits; the conversion proves that no input can overflow it."""
