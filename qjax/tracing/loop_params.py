"""The parameters of a scan, under the names that all supported versions of jax have in common."""

from collections.abc import Mapping
from typing import Any


def with_counts(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a scan with num_consts and num_carry, which jax 0.12 holds as the structure of its inputs."""
    if "num_consts" in params:
        return params
    consts, carry, _ = params["ft_in"].unpack()
    return {**params, "num_consts": len(list(consts.vals)), "num_carry": len(list(carry.vals))}
