"""Compiles a call that is made outside of any trace, so that one program runs instead of hundreds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from qjax.graph.structure import join_arguments, split_arguments
from qjax.layers import Definition, write_state
from qjax.model.call import Call
from qjax.support.batches import as_array


def compiled(qmodel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The compiled call of a quantized model; None while JAX traces it already, or where no cache can hold it.

    Running it returns the model's output and updates the model's own state. It is compiled once per model, mode and
    shapes of the arguments, because the numbers of the model are arguments of the program.

    Args:
      qmodel: a `QuantizedModel`. args, kwargs: those of its `__call__`.
    """
    graphdef, state = nnx.split(qmodel)
    definition = Definition.of(graphdef)
    arrays, rest = split_arguments((args, kwargs))
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, arrays))):
        return None
    try:
        hash((definition, rest))
    except TypeError:
        return None  # a module with a dict or a list as an attribute has no hash

    def call() -> Any:
        output, changed = _compiled(definition, state, [as_array(x) for x in arrays], rest)
        if changed is not None:
            write_state(qmodel.model, changed)
        return output

    return call


def _outputs(definition: Definition, state: Any, arrays: Any, rest: Any) -> tuple[Any, Any]:
    args, kwargs = join_arguments(arrays, rest)
    call: Call = nnx.merge(definition.graphdef, state).trace(*args, **kwargs)
    # nothing differentiates this program, so a key around it is not its constant
    evaluated = dataclasses.replace(call, gradients=None).evaluate()
    return evaluated.output, call.traced.new_state(evaluated.values)


_compiled = jax.jit(_outputs, static_argnums=(0, 3))
