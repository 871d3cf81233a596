"""Reads `platform_dependent`, which computes in one form on the CPU and in another elsewhere, for emitters."""

from collections.abc import Mapping
from typing import Any


def plainest(params: Mapping[str, Any]) -> int:
    """Which branch to read, from the parameters of a `platform_index`: the one for no platform in particular.

    Every branch computes the same numbers. The others are written for what XLA is fast at.
    """
    return params["platforms"].index(None)
