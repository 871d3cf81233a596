"""The form of `gather` that C and circuits support: whole rows of a table, selected by clipped indices."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.lax import GatherScatterMode


def takes_rows(params: Mapping[str, Any], table: Sequence[int], indices: Sequence[int], rank: int) -> bool:
    """Whether result[i, ...] is table[clip(indices[i, 0]), ...].

    Args:
      params: of the equation.
      table, indices: the shapes of its operands; the last axis of the indices has one number for each indexed axis.
      rank: of the result.
    """
    numbers, leading = params["dimension_numbers"], len(indices) - 1
    return (
        tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not (numbers.operand_batching_dims or numbers.start_indices_batching_dims)
        and tuple(numbers.offset_dims) == tuple(range(leading, rank))
        and tuple(params["slice_sizes"]) == (1, *table[1:])
        and indices[-1] == 1
        and GatherScatterMode.from_any(params["mode"]) is GatherScatterMode.CLIP
    )
