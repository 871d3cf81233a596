"""Neighbouring axes that a loop over two operands walks alike, so that they are one axis to it."""

from collections.abc import Sequence


def joined_axes(first: Sequence[bool], second: Sequence[bool]) -> list[range]:
    """The axes in groups of neighbours along which both operands move, or the same one is repeated.

    first, second: for each axis of the result, whether the operand has several elements along it. An axis along which
    neither has is in the group before it, the first such axes in the group behind them.
    """
    groups: list[range] = []
    last: tuple[bool, bool] | None = None
    for axis, moves in enumerate(zip(first, second, strict=True)):
        if groups and (moves == (False, False) or last in (moves, (False, False))):
            groups[-1] = range(groups[-1].start, axis + 1)
        else:
            groups.append(range(axis, axis + 1))
        last = last if moves == (False, False) and last is not None else moves
    return groups
