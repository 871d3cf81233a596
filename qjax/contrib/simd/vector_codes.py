"""From sixteen sums to sixteen codes of 8 bits: calls of `vectors.h`, and the vectors of constants that they need."""

import abc
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from qjax.export.emit.c.text import STORED
from qjax.export.emit.requantizations import Finish
from qjax.export.emit.requantize_float32 import Scaled

FEATURES = 16
"""Features in a block."""

Vector = Callable[[str, np.ndarray], str]
"""(role, a number per feature) -> a pointer to the numbers of the block."""


class Codes(abc.ABC):
    """How the codes are computed."""

    @abc.abstractmethod
    def text(self, number: str, vector: Vector) -> str:
        """The expression of the codes. number: of the sums."""


@dataclasses.dataclass(frozen=True)
class InFloats(Codes):
    """In float32, as in `Scaled`."""

    scaled: Scaled

    def text(self, number: str, vector: Vector) -> str:
        scaled = self.scaled
        given = [vector("bias", scaled.bias.astype(np.int32)), vector("scale", scaled.scale)]
        numbers = [str(number) for number in (scaled.zero_point, scaled.lowest, scaled.highest)]
        return f"numbers16_scaled({', '.join([number, *given, *numbers])})"


@dataclasses.dataclass(frozen=True)
class InIntegers(Codes):
    """In integers, by a multiplication and shift; `lift` was added so that no quotient is negative."""

    factor: np.ndarray
    offset: np.ndarray
    kink: np.ndarray | None
    below: np.ndarray | None
    raised: list[np.ndarray]
    shift: int
    lift: int
    least: int
    most: int

    def text(self, number: str, vector: Vector) -> str:
        given = [vector("factor", self.factor), vector("offset", self.offset)]
        function = "numbers16_quotients"
        if self.kink is not None and self.below is not None:
            function = "numbers16_sides"
            given += [vector("kink", self.kink), vector("below", self.below)]
        for row, raised in enumerate(self.raised):
            number = f"numbers16_raised({number}, {vector(f'raised{row}', raised)})"
        numbers = [str(number) for number in (self.shift, self.lift, self.least, self.most)]
        return f"{function}({', '.join([number, *given, *numbers])})"


def stored(codes: str, out: str, features: int, dtype: str) -> list[str]:
    """The lines that write the codes of a block to memory, of which there may be fewer than sixteen."""
    suffix = "u8" if dtype == "uint8" else "i8"
    if features >= FEATURES:
        return [f"numbers16_{suffix}({codes}, {out});"]
    few = [
        f"{STORED[dtype]} few[{FEATURES}];",
        f"numbers16_{suffix}({codes}, few);",
        f"memcpy({out}, few, {features});",
    ]
    return ["{", *(f"    {line}" for line in few), "}"]


def codes_of(finish: Finish | None, features: int, dtype: str) -> Codes | None:
    """The form of the codes; None if they have more than 8 bits, or a number does not fit its type."""
    if finish is None or dtype not in ("int8", "uint8") or math.prod(finish.shape) not in (1, features):
        return None
    if finish.scaled is not None:
        scaled = finish.scaled
        bias, scale = (np.broadcast_to(x, (features,)) for x in (scaled.bias, scaled.scale))
        if int(abs(bias).max(initial=0)) < 2**31:
            return InFloats(dataclasses.replace(scaled, bias=bias, scale=scale))
    line = finish.line
    if line is None:
        return None
    lift = max(0, -line.least)
    if int(abs(line.factor).max(initial=0)) >= 2**31 or (line.most + lift + 1) << line.shift >= 2**63:
        return None

    def vector(values: np.ndarray, kind: type[np.integer]) -> np.ndarray:
        return np.broadcast_to(values, (features,)).astype(kind)

    more = np.int64(lift) << np.int64(line.shift)
    return InIntegers(
        vector(line.factor, np.int32),
        vector(line.offset + more, np.int64),
        None if line.kink is None else vector(line.kink, np.int32),
        None if line.below is None else vector(line.below + more, np.int64),
        [] if line.raised is None else [vector(row, np.int32) for row in line.raised],
        line.shift,
        lift,
        line.lowest,
        line.highest,
    )
