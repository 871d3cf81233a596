"""Marks loops whose iterations several threads may share, by OpenMP pragmas.

The codes do not depend on the number of threads, because an iteration of such a loop declares its local arrays inside
and writes elements that no other iteration writes. A loop is marked if it takes longer than starting a thread.
"""

from collections.abc import Sequence

from qjax.export.emit.c.blocks import Source, loop_head

_MARK = "QJAX_THREADS"
_LEAST = 2**14
"""Loops with at least this many elements are shared. Threads need some microseconds to start and to join."""
_PRODUCTS = 64
"""Products of vectors that take about as long as one element."""

MACRO = f"""\
#if defined(_OPENMP) && defined(QJAX_THREAD_COUNT)
#define {_MARK} _Pragma("omp parallel for schedule(static) num_threads(QJAX_THREAD_COUNT)")
#elif defined(_OPENMP)
#define {_MARK} _Pragma("omp parallel for schedule(static)")
#else
#define {_MARK}
#endif"""


def marked(source: Source, heads: Sequence[str], elements: int, turns: int = 0) -> list[str]:
    """The openings of nested loops, the first of which threads share if that pays off.

    elements: how many the nest writes. turns: iterations of its inner loops, for all elements together.
    """
    if not source.threads or not heads or elements + turns < _LEAST:
        return list(heads)
    source.helpers.add("threads")
    return [f"{_MARK} {heads[0]}", *heads[1:]]


def shared(source: Source, name: str, extent: int, elements: int, products: int, *, overlap: bool = False) -> list[str]:
    """The opening of a loop that starts at 0, whose iterations threads share if that pays off.

    elements: how many the nest writes. products: how many it sums with vectors. overlap: whether the last iteration
    also writes elements of the one before it. One thread then computes both.
    """
    head = loop_head(name, extent)
    work = elements + products // _PRODUCTS
    if not source.threads or work < _LEAST or extent < (3 if overlap else 2):
        return [head]
    if not overlap:
        return marked(source, [head], work)
    end = f"share + 1 + (share == {extent - 2})"
    inner = f"for (int32_t {name} = share; {name} < {end}; {name}++) {{"
    return marked(source, [loop_head("share", extent - 1), inner], work)


__all__ = ["MACRO", "marked", "shared"]
