"""Finds lookup tables whose input has too few codes for their function, such as a sine over many periods."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from qjax.numerics.affine import QParams
from qjax.numerics.elementary import Expression
from qjax.numerics.elementary.intervals import Steps
from qjax.tracing.annotation import Annotation
from qjax.tracing.program import Equation

_CODES = 128
"""An input with fewer codes than this is coarse whatever the function, so it is not reported."""
_STEP = 1 / 16
"""Part of the function's range by which neighbouring results may differ: 16 codes of 8 bits."""
_SHARE = 1 / 8
"""Part of the codes that may exceed this; one or two jumps (a sign, a reciprocal) are harmless."""
_BITS = 16


@dataclasses.dataclass(frozen=True)
class Lost:
    """A table whose input has too few codes.

    share: of neighbouring codes, the part that `steep` measures. coarse: the quantizers of fewer than 16 bits that
    round what the function reads: those between the table and the last tensor made from several others, or the model's
    input.
    """

    share: float
    coarse: tuple[str, ...]


def steep(eqn: Equation, qparams: QParams) -> float:
    """The share of neighbouring codes whose results lie more than a 16th of the function's range apart.

    It is 0 for an input of fewer than 128 codes and for a function with parameters, because training changes those.
    """
    expression, spec = Expression.from_json(eqn.params["expression"]), qparams.spec
    if expression.parameters or spec.levels < _CODES or np.size(qparams.scale) != 1:
        return 0.0
    scale, zero_point = (np.asarray(a).reshape(()) for a in (qparams.scale, qparams.zero_point))
    x = (np.arange(spec.qmin, spec.qmax + 1) - zero_point) * scale.astype(np.float64)
    with np.errstate(all="ignore"):
        low, high = Steps(x.shape).run(expression, x, ())
        y = np.broadcast_to((np.asarray(low, np.float64) + high) / 2, x.shape)
        y = y[np.isfinite(y)]
    if y.size < _CODES or not np.ptp(y) > 0:
        return 0.0
    return float(np.mean(np.abs(np.diff(y)) > _STEP * np.ptp(y)))


def lost_tables(annotation: Annotation, qparams_of: Callable[[str], QParams | None]) -> dict[Equation, Lost]:
    """The tables whose input has too few codes: more than one in eight steps is `steep`."""
    found: dict[Equation, Lost] = {}
    for eqn, place in annotation.tables.items():
        qparams = qparams_of(place.name)
        share = 0.0 if qparams is None else steep(eqn, qparams)
        if share > _SHARE:
            found[eqn] = Lost(share, _coarse(annotation, eqn, qparams_of))
    return found


def _coarse(annotation: Annotation, eqn: Equation, qparams_of: Callable[[str], QParams | None]) -> tuple[str, ...]:
    made = {value: before for before in annotation.ops for value in before.outputs}
    names: list[str] = []
    while True:
        read = [v for v, constant in zip(eqn.inputs, annotation.is_constant(eqn), strict=True) if not constant]
        if len(read) != 1:
            break
        place = annotation.values.get(read[0])
        qparams = None if place is None else qparams_of(place.name)
        if place is not None and qparams is not None and qparams.spec.bits < _BITS:
            names.append(place.name)
        if read[0] not in made:
            break
        eqn = made[read[0]]
    return tuple(dict.fromkeys(reversed(names)))


def said(lost: Mapping[Equation, Lost]) -> str:
    """The warning's text: what is wrong with such tables, and the cures."""
    found = dict.fromkeys(
        f"{eqn.location or eqn.scope or 'the model'}: the function {_function_name(eqn)} changes by more than 16 of "
        f"256 codes between {one.share:.0%} of its input's neighbouring codes"
        for eqn, one in lost.items()
    )
    several = len(found) > 1
    coarse = ", ".join(repr(name) for name in dict.fromkeys(name for one in lost.values() for name in one.coarse))
    more_bits = (
        f"Give {'their inputs, and what these are' if several else 'its input, and what that is'} made from, {_BITS} "
        f"bits: overrides={{name: qjax.Override(activations=qjax.QSpec(bits={_BITS})) for name in [{coarse}]}}. "
    )
    return (
        ";\n".join(found)
        + f". The conversion is exact, but the input has too few codes for the function{'s' if several else ''}. "
        f"{more_bits if coarse else ''}Bound the input to one period, or compute the function of integers: a "
        "function of an integer input is a table of its own (qjax.integers)."
    )


def _function_name(eqn: Equation) -> str:
    expression = Expression.from_json(eqn.params["expression"])
    return expression.bare or " ".join(dict.fromkeys(name for name, _ in expression.steps))
