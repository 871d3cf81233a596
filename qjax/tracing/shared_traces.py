"""Traces the training forward of equal equations only once (see `numerics.calls`), which shortens compilation.

An operation's training forward is a function of its equation and of arrays. Equations are compared by identity, so they
are first turned into a `Form`, which holds all that an operation may read of an equation and compares by content.
"""

import contextlib
import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from qjax.numerics.calls import traced_once
from qjax.ops import backward
from qjax.ops.base import Op
from qjax.ops.recomputed import is_recomputed, recomputed
from qjax.tracing.program import Composite, Equation, bind_equation, is_plain


@dataclasses.dataclass(frozen=True)
class Form:
    """An equation as `ops.base.Equation` describes it, compared by content.

    source: the primitive of the jaxpr, which `primitive` names. items: those of its parameters.
    """

    primitive: str
    source: Any
    items: tuple[tuple[str, Any], ...]
    in_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[Any, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[Any, ...]
    fixed: tuple[bool, ...]

    @property
    def params(self) -> Mapping[str, Any]:
        return dict(self.items)

    @property
    def literals(self) -> tuple[Any, ...]:
        return (None,) * len(self.in_shapes)

    def bind(self, *args: Any) -> list[Any]:
        return bind_equation(types.SimpleNamespace(primitive=self.source, params=self.params), args)


def form_of(eqn: Equation) -> Form | None:
    """The form of an equation; None if its contents cannot be compared, or a literal is among the inputs."""
    items = tuple(sorted(eqn.params.items()))
    if isinstance(eqn.source, Composite) or any(x is not None for x in eqn.literals):
        return None
    if not all(is_plain(value) for _, value in items):
        return None
    shapes = (eqn.in_shapes, eqn.in_dtypes, eqn.out_shapes, eqn.out_dtypes)
    return Form(eqn.primitive, eqn.source.primitive, items, *shapes, eqn.fixed)


def training(op: Op, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
    """`op.training(eqn, inputs)`; for an op with `traced_once`, as a call that equal equations share."""
    step = backward.current()
    how, words = (None, None) if step is None else (step.how, step.own)
    if op.traced_once and all(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
        form = form_of(eqn)
        if form is not None:
            return _traced_once(op, form, is_recomputed(), how, list(inputs), words)
    with backward.integer_backward(how, words):
        return op.training(eqn, inputs)


@traced_once(0, 1, 2, 3)
def _traced_once(op: Op, form: Form, again: bool, how: Any, inputs: list[Any], words: Any) -> list[Any]:
    with backward.integer_backward(how, words), recomputed() if again else contextlib.nullcontext():
        return op.training(form, inputs)
