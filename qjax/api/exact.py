"""The exact forward: its value is the integer graph's, its gradient that of fake quantization."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.api.convert import Batch, check_batch, graph_of
from qjax.assign.overflow import may_wrap
from qjax.graph.ir import Graph
from qjax.graph.kernels import prepare
from qjax.graph.state import Asked
from qjax.graph.structure import sample_like
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.meshes import automatic, explicit_mesh, spec_of, typed, untyped
from qjax.numerics.surrogate import with_gradient_of
from qjax.run import loop_execution
from qjax.run.find_loops import over_iterations, repeats
from qjax.run.quantize_io import dequantize_outputs, inputs_of, quantize_inputs
from qjax.run.shared_constants import SharedConstants
from qjax.support.batches import arguments_of, brief
from qjax.support.on_cpu import on_cpu
from qjax.support.progress import stage
from qjax.support.transfers import with_transfers

Forward = Callable[..., Any]


@with_transfers
def exact(
    qmodel: QuantizedModel,
    sample: Any,
    *,
    target: Any = None,
    batch: Batch | None = None,
    state: Asked | None = None,
) -> Forward:
    """Return a forward whose value is the integer graph's and whose gradient is the fake-quantized model's.

    `forward(qmodel, *inputs)` returns the output of the graph that `convert` would make from the parameters that
    `qmodel` holds at that call. The interpreter's kernels compute it, also inside jit and grad, and it is float32
    whatever the model's own dtype. It is NaN where the fake-quantized forward is NaN, and everywhere under weights that
    `convert` would refuse because an accumulator could overflow. The model runs in evaluation mode, so batch statistics
    are read but not updated. A call with other Python values (a flag, None) than the sample's computes the graph for
    those values. Use it for the last epochs, so that training sees the deployed rounding:

        forward = qjax.exact(qmodel, sample)

        @nnx.jit
        def step(qmodel, optimizer, x, y):
            loss, grads = nnx.value_and_grad(lambda m: criterion(forward(m, x), y))(qmodel)
            optimizer.update(qmodel, grads)

    Args:
      qmodel: the quantized model.
      sample: one batch, as for `convert`.
      target: the runtime whose rounding to match; None takes the recipe's.
      batch: as for `convert`.
      state: as for `convert`.
    """
    check_quantized(qmodel, "exact", numbers=False)
    args = arguments_of(sample, "exact", traced=True)
    chosen = target or qmodel.plan.target
    check_batch("exact", batch)
    with stage("exact"), on_cpu(qmodel, args) as (near, arrays):
        # Convert once with concrete numbers, so that what cannot be converted is reported here.
        graph_of(_stop_gradients(near), arrays, chosen, batch, state)
    qmodel.warn_if_blind("exact")

    @with_transfers
    def forward(qmodel: QuantizedModel, *inputs: Any) -> Any:
        if not isinstance(qmodel, QuantizedModel):
            raise TypeError(
                f"exact: expected the quantized model as the forward's first argument, got {brief(qmodel)}. Call "
                "forward(qmodel, x)."
            )
        with stage("exact forward: the first call compiles"):
            view = evaluation_copy(qmodel)
            ir = graph_of(_stop_gradients(view), sample_like(args, inputs), chosen, batch, state, checked=True)
            reals = view(*inputs)
            mesh = explicit_mesh((reals, inputs))
            with automatic(mesh):
                value = _value(ir, *untyped((jax.lax.stop_gradient(inputs_of(ir, inputs)), reals)))
            return value if mesh is None else typed(value, jax.tree.map(spec_of, jax.tree.map(jax.typeof, reals)), mesh)

    return forward


def _value(ir: Graph, arrays: list[Any], reals: Any) -> Any:
    """The outputs of the program on float inputs, with the gradients of the model's own outputs, `reals`."""
    own = prepare(ir)
    loops = repeats(ir, own)
    # Without the barrier XLA may recompute a constant for every output that reads it.
    constants = jax.lax.optimization_barrier(SharedConstants.of(own, over_iterations(ir, loops)))
    env = loop_execution.outputs(ir, loops, constants, quantize_inputs(ir, arrays), ir.outputs)
    value = dequantize_outputs(ir, [env[name] for name in ir.outputs])
    wraps = may_wrap(ir)
    surrogate = jax.tree.map(_cast_like, reals, value)
    flagged = jax.tree.map(lambda y, v: _flag_invalid(y, v, wraps), surrogate, value)
    return jax.tree.map(with_gradient_of, surrogate, flagged)


def _stop_gradients(qmodel: QuantizedModel) -> QuantizedModel:
    """The model without derivatives, because the graph's numbers have none: its tables are made on the host."""
    definition, variables = nnx.split(qmodel)
    return nnx.merge(definition, jax.lax.stop_gradient(variables))


def _cast_like(surrogate: jax.Array, value: jax.Array) -> jax.Array:
    """Check the shape of the surrogate, and cast it to the value's dtype."""
    if surrogate.shape != value.shape:
        raise ValueError(
            f"exact: the model returns shape {surrogate.shape} on this batch, but its graph {value.shape}, because the "
            "model treats this batch differently from the sample's. jnp.squeeze without an axis does so for a batch of "
            "one: name the axis."
        )
    return surrogate.astype(value.dtype)


def _flag_invalid(surrogate: jax.Array, value: jax.Array, wraps: Any) -> jax.Array:
    """`value`, but NaN where the fake-quantized forward is NaN or an accumulator may have wrapped (`may_wrap`)."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    lost = jnp.isnan(jax.lax.stop_gradient(surrogate))
    if wraps is not None:
        lost = lost | wraps
    return jnp.where(lost, jnp.full_like(value, np.nan), value)
