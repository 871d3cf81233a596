"""The plan of memory: live blocks never overlap, nor do those of two wide types; usual models take the least arena."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.export.emit.c.arena import Block, lower_bound, plan


@st.composite
def lives(draw):
    first = draw(st.integers(0, 12))
    return draw(st.integers(0, 300)), first, first + draw(st.integers(0, 6)), draw(st.sampled_from([1, 1, 2, 4]))


@pytest.mark.exhaustive
@given(st.lists(lives(), max_size=14), st.sampled_from([4, 8]))
def test_neither_live_blocks_nor_those_of_two_wide_types_ever_overlap(blocks, alignment):
    named = [Block(str(i), *block) for i, block in enumerate(blocks)]
    made = plan(named, alignment)
    for i, a in enumerate(named):
        assert made.offsets[a.name] % alignment == 0
        assert 0 <= made.offsets[a.name] <= made.size - a.size
        for b in named[:i]:
            together = a.first <= b.last and b.first <= a.last
            apart = (
                made.offsets[a.name] + a.size <= made.offsets[b.name]
                or made.offsets[b.name] + b.size <= made.offsets[a.name]
            )
            two_types = a.width > 1 and b.width > 1 and a.width != b.width
            assert apart or not (together or two_types)
    assert made.bound <= made.size <= sum(-(-b.size // alignment) * alignment for b in named)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_a_chain_reaches_the_bound(sizes):
    """Layer after layer: two neighbours are alive at once, and no more."""
    blocks = [Block(str(i), size, i, i + 1) for i, size in enumerate(sizes)]
    made = plan(blocks)
    assert made.size == made.bound == max(a + b for a, b in zip([*sizes, 0], [0, *sizes], strict=True))


def test_the_bound_is_the_greatest_sum_of_live_blocks():
    blocks = [Block("a", 10, 0, 2), Block("b", 20, 1, 1), Block("c", 5, 2, 4), Block("d", 24, 3, 4)]
    assert lower_bound(blocks) == 30
    assert plan(blocks).size == 30


def test_no_block_needs_no_memory():
    assert plan([]).size == 0
