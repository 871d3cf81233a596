"""A static memory plan: every intermediate tensor has a fixed place in one arena, whose memory is reused.

    a = f(x)    a: bytes 0 to 99
    b = g(a)    b: bytes 100 to 149
    c = h(b)    c: bytes 0 to 79, because a is not read any more

Step t runs node t. A block is alive from the step that writes it to the last step that reads it. Scratch memory is
alive for one step. Two blocks that are alive in the same step never overlap, and because of C's aliasing rules neither
do blocks of different types wider than a character. The lower bound of the size is the largest sum of live blocks over
all steps. The plan tries several orders and chooses the best, which reaches the bound for the usual models.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

_EXHAUSTIVE = 5
"""Up to this many blocks, all orders are tried."""


@dataclasses.dataclass(frozen=True)
class Block:
    """size: bytes. first, last: the first and the last step at which its content matters.

    width: of an element. C lets characters (width 1) share memory with anything; memory that was used as one wider type
    must not be used as another. real: whether the elements are floats, which are a type of their own.
    """

    name: str
    size: int
    first: int
    last: int
    width: int = 1
    real: bool = False

    def meets(self, other: "Block") -> bool:
        """Whether both are alive at some step."""
        return self.first <= other.last and other.first <= self.last

    def excludes(self, other: "Block") -> bool:
        """Whether the two blocks may never have a byte in common."""
        same = (self.width, self.real) == (other.width, other.real)
        return self.meets(other) or (not same and 1 not in (self.width, other.width))


@dataclasses.dataclass(frozen=True)
class Plan:
    """offsets: in bytes, by name. size: of the arena. bound: a lower bound for any plan. alignment: of offsets.

    widths: of the elements of all blocks. reals: whether there are floats among them.
    """

    offsets: dict[str, int]
    size: int
    bound: int
    alignment: int
    widths: frozenset[int] = frozenset()
    reals: bool = False


def plan(blocks: Sequence[Block], alignment: int | None = None) -> Plan:
    """Places for blocks with different names. alignment: by default the width of the widest element."""
    alignment = max((b.width for b in blocks), default=1) if alignment is None else alignment
    rounded = [dataclasses.replace(b, size=-(-b.size // alignment) * alignment) for b in blocks]
    bound = lower_bound(rounded)
    best: tuple[int, dict[str, int]] | None = None
    for offsets in _tried(rounded, bound):
        size = max((offsets[b.name] + b.size for b in rounded), default=0)
        if best is None or size < best[0]:
            best = size, offsets
        if size == bound:
            break
    assert best is not None
    widths = frozenset(b.width for b in blocks)
    reals = any(b.real for b in blocks)
    return Plan({b.name: best[1][b.name] for b in blocks}, best[0], bound, alignment, widths, reals)


def lower_bound(blocks: Sequence[Block]) -> int:
    """The greatest sum of blocks that are alive at one step."""
    steps = {b.first for b in blocks}
    return max((sum(b.size for b in blocks if b.first <= step <= b.last) for step in steps), default=0)


def _tried(blocks: Sequence[Block], bound: int) -> Iterator[dict[str, int]]:
    in_time = sorted(blocks, key=lambda b: (b.first, -b.size, b.name))
    for first in (0, 1):
        yield _from_both_ends(in_time, bound, first)
    for order in _orders(blocks):
        yield _place_blocks(order)


def _from_both_ends(order: Sequence[Block], bound: int, first: int) -> dict[str, int]:
    """Place blocks alternately at the bottom and the top of an arena of the least size, so that a chain always fits."""
    offsets: dict[str, int] = {}
    done: list[Block] = []
    for turn, block in enumerate(order):
        taken = [(offsets[o.name], offsets[o.name] + o.size) for o in done if o.excludes(block)]
        starts = sorted(
            {0, *(stop for _, stop in taken), *(start - block.size for start, _ in taken), bound - block.size}
        )
        free = [s for s in starts if s >= 0 and all(s + block.size <= a or b <= s for a, b in taken)]
        within = [s for s in free if s + block.size <= bound]
        offsets[block.name] = (within[-1] if turn % 2 == first else within[0]) if within else free[-1]
        done.append(block)
    return offsets


def _orders(blocks: Sequence[Block]) -> "itertools.chain[Sequence[Block]]":
    known = (
        sorted(blocks, key=lambda b: (-b.size, b.first, b.name)),
        sorted(blocks, key=lambda b: (-(b.last - b.first), -b.size, b.name)),
        sorted(blocks, key=lambda b: (-(b.last - b.first + 1) * b.size, b.name)),
        sorted(blocks, key=lambda b: (b.first, -b.size, b.name)),
        sorted(blocks, key=lambda b: (b.first, -b.last, -b.size, b.name)),
        sorted(blocks, key=lambda b: (-b.last, -b.size, b.name)),
    )
    every = itertools.permutations(known[0]) if len(blocks) <= _EXHAUSTIVE else ()
    return itertools.chain(known, every)


def _place_blocks(order: Sequence[Block]) -> dict[str, int]:
    """Place each block in the smallest gap between blocks that were placed before, or after all of them."""
    offsets: dict[str, int] = {}
    done: list[Block] = []
    for block in order:
        taken = sorted((offsets[o.name], offsets[o.name] + o.size) for o in done if o.excludes(block))
        end, place, gap = 0, None, None
        for start, stop in taken:
            free = start - end
            if free >= block.size and (gap is None or free < gap):
                place, gap = end, free
            end = max(end, stop)
        offsets[block.name] = end if place is None else place
        done.append(block)
    return offsets
