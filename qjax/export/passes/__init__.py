"""Passes: pure functions from graph to graph."""

from qjax.export.passes.bounds import codes_of_bounds
from qjax.export.passes.clean import remove_dead, remove_identities
from qjax.export.passes.overflow import check_accumulators

__all__ = ["check_accumulators", "codes_of_bounds", "remove_dead", "remove_identities"]
