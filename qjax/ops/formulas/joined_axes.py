"""Merges neighbouring axes that a loop over two operands treats alike, as the loops of runtimes do.

shapes (2, 3, 4) and (1, 1, 4)    ->    the axes {0, 1}, along which the second operand is repeated, and {2}
"""

from collections.abc import Sequence


def joined_axes(first: Sequence[bool], second: Sequence[bool]) -> list[range]:
    """Groups of neighbouring axes along which both operands advance, or the same one is repeated.

    first, second: for each axis of the result, whether the operand has several elements along it. An axis along which
    neither has is in the group before it, and the first such axes are in the group after them.
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
