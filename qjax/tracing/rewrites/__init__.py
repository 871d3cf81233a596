"""Rewriters: pure functions from program to program that recognise functions which span several equations.

    e = exp(x - max(x)); y = e / sum(e)    ->    y = softmax(x)

Each runs on every program, and on every body of a scan or remat, in the order of `REWRITERS`. Functions over axes come
first (a normalisation, a softmax), then the remaining elementwise functions. To add one, write its file and list it.
"""

import dataclasses
from collections.abc import Callable, Sequence

from qjax.tracing.program import Program
from qjax.tracing.rewrites.batch_invariant_constants import share_rows
from qjax.tracing.rewrites.boolean_masks import keep_truth
from qjax.tracing.rewrites.broadcast_operands import divide_constants, spread_operands
from qjax.tracing.rewrites.centered import center_first
from qjax.tracing.rewrites.complex_as_real import write_pairs
from qjax.tracing.rewrites.constant_scatter_gather import place_constants
from qjax.tracing.rewrites.dropout import find_dropout
from qjax.tracing.rewrites.dynamic_slices import place_slices
from qjax.tracing.rewrites.expert_routing import write_routing
from qjax.tracing.rewrites.float_mask_inputs import find_flags, turned
from qjax.tracing.rewrites.hoist_sink_scan_bodies import hoist_functions, sink_masks
from qjax.tracing.rewrites.int32_wraparound import write_wraps, write_wraps_inside
from qjax.tracing.rewrites.integers import find_integer_functions
from qjax.tracing.rewrites.kept_carries import keep_carries
from qjax.tracing.rewrites.late_division import divide_first
from qjax.tracing.rewrites.literals import fold_literals
from qjax.tracing.rewrites.log_softmax import find_log_softmax
from qjax.tracing.rewrites.mark_parameters import mark_fixed
from qjax.tracing.rewrites.masked_logs import mask_logs
from qjax.tracing.rewrites.moves import simplify_moves
from qjax.tracing.rewrites.normalize import find_normalize
from qjax.tracing.rewrites.open_calls import open_calls
from qjax.tracing.rewrites.per_example_gathers import take_own
from qjax.tracing.rewrites.reduce_prod import write_factors
from qjax.tracing.rewrites.searchsorted import write_searches
from qjax.tracing.rewrites.softmax import find_softmax
from qjax.tracing.rewrites.split_additive_masks import part_masks
from qjax.tracing.rewrites.tables import find_tables
from qjax.tracing.rewrites.triangular_solve import write_solves
from qjax.tracing.rewrites.unbroadcast_operands import read_unrepeated
from qjax.tracing.rewrites.unread import drop_unread
from qjax.tracing.rewrites.whole_gathers import read_whole

Rewriter = Callable[[Program], Program]

REWRITERS: tuple[Rewriter, ...] = (
    open_calls,
    write_searches,
    write_solves,
    write_factors,
    write_routing,
    simplify_moves,
    keep_truth,
    read_whole,
    take_own,
    place_constants,
    place_slices,
    share_rows,
    find_dropout,
    center_first,
    find_normalize,
    part_masks,
    share_rows,
    divide_first,
    find_softmax,
    find_log_softmax,
    mask_logs,
    find_integer_functions,
    divide_constants,
    find_tables,
    read_unrepeated,
    spread_operands,
    write_wraps,
    fold_literals,
)

_INSIDE: dict[Rewriter, Rewriter] = {write_wraps: write_wraps_inside}
"""The rewriter for bodies, if it is not the one for whole programs."""


def rewrite(program: Program, constant: Sequence[bool] = ()) -> Program:
    """Apply every rewriter, bodies included; constant: per input, whether it is a parameter."""
    program = keep_carries(drop_unread(program))
    mark_fixed(program, constant)
    program = write_pairs(program)
    mark_fixed(program, constant)
    program = sink_masks(find_flags(turned(hoist_functions(program))))
    mark_fixed(program, constant)
    return _rewrite(program, REWRITERS)


def _rewrite(program: Program, rewriters: Sequence[Rewriter]) -> Program:
    inner = [_INSIDE.get(rewriter, rewriter) for rewriter in rewriters if rewriter is not find_integer_functions]
    equations = tuple(
        eqn if eqn.body is None else dataclasses.replace(eqn, body=_rewrite(eqn.body, inner))
        for eqn in program.equations
    )
    program = dataclasses.replace(program, equations=equations)
    for rewriter in rewriters:
        program = rewriter(program)
    return program
