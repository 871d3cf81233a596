"""Parts of a model between two points where a single tensor is alive, such as residual blocks, as functions."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from qjax.training.walk import Pieces, Stream, Walk

Tensors = list[jax.Array]
"""What is alive between two blocks."""


class Block:
    """One part, for every batch of a list.

    Attributes:
      names: of the weights of its layers.
      parameters: the paths of all parameters that it reads.
      quantizers: those inside of it.
    """

    def __init__(self, pieces: Sequence[Pieces], first: int, last: int) -> None:
        self._pieces, self._range = pieces, range(first, last + 1)
        self.names = tuple(pieces[0].items[i - 1].name for i in self._range if i)
        reads = [pieces[0].reads(i) for i in self._range]
        self.parameters = list(dict.fromkeys(path for paths, _ in reads for path in paths))
        self.quantizers = list(dict.fromkeys(name for _, names in reads for name in names))

    def __call__(self, batch: int, stream: Stream, tensors: Tensors) -> Tensors:
        """What is alive behind it. It is pure JAX in the tensors and in the stream's numbers."""
        pieces = self._pieces[batch]
        live = dict(zip(pieces.entering(self._range[0]), tensors, strict=True))
        for index in self._range:
            live = pieces.step(index, stream, live)
        return [live[value] for value in pieces.entering(self._range[-1] + 1)]

    def alike(self, a: int, b: int) -> bool:
        """Whether two batches have the same shapes."""
        return self._pieces[a] is self._pieces[b]


def blocks_of(walk: Walk, batches: Sequence[tuple[Any, ...]]) -> tuple[list[Block], list[Tensors]]:
    """The blocks in the order of execution, and for every batch what enters the first one."""
    pieces = [walk.pieces(args) for args in batches]
    last = len(walk.items)
    starts = [0, *(i for i in range(1, last + 1) if pieces[0].single(i)), last + 1]
    blocks = [Block(pieces, a, b - 1) for a, b in itertools.pairwise(starts)]
    entering = [list(one.start(args).values()) for one, args in zip(pieces, batches, strict=True)]
    return blocks, entering
