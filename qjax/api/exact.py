"""The exact forward: its value is the integer graph's, its gradient that of fake quantization."""

from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.api.convert import Batch, check_batch, graph_of
from qjax.api.derived_constants import DerivedConstants, fingerprint_of
from qjax.graph.state import Asked
from qjax.graph.structure import sample_like
from qjax.model.fingerprint import compare
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.meshes import along_batch, automatic, explicit_mesh, in_automatic, spec_of, typed, untyped
from qjax.numerics.surrogate import with_gradient_of
from qjax.run.quantize_io import inputs_of
from qjax.support.batches import arguments_of, brief
from qjax.support.on_cpu import on_cpu
from qjax.support.progress import stage
from qjax.support.transfers import with_transfers


class Forward(Protocol):
    """What `exact` returns: a function of a quantized model, or of constants derived from one, and of the inputs.

    Methods:
      constants: `constants(qmodel)` derives the constants of the graph once. `forward(constants, *inputs)` then is the
        same value as `forward(qmodel, *inputs)`, without a derivation and without a gradient. They are a pytree, so
        that a jitted step takes the constants of changed parameters without a compilation.
      check: `check(constants, qmodel)` raises a ValueError where these are not the constants of the model's present
        parameters, or not those of this forward.
    """

    def __call__(self, qmodel: QuantizedModel | DerivedConstants, *inputs: Any) -> Any: ...

    def constants(self, qmodel: QuantizedModel) -> DerivedConstants: ...

    def check(self, constants: DerivedConstants, qmodel: QuantizedModel) -> None: ...


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
    those values. Samplers derive the graph's constants once per update, by `forward.constants(qmodel)`: see `Forward`.
    Use it for the last epochs, so that training sees the deployed rounding:

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
    maker = object()

    def derive(view: QuantizedModel, inputs: tuple[Any, ...], fingerprint: Any) -> DerivedConstants:
        ir = graph_of(_stop_gradients(view), sample_like(args, inputs), chosen, batch, state, checked=True)
        with automatic(explicit_mesh((_numbers(view), inputs))):
            return DerivedConstants.of(ir, fingerprint, maker)

    @with_transfers
    def forward(qmodel: QuantizedModel | DerivedConstants, *inputs: Any) -> Any:
        if isinstance(qmodel, DerivedConstants):
            _check_maker(qmodel, maker)
            return in_automatic(_call, (qmodel, inputs), along_batch(jax.tree.leaves(inputs)))
        if not isinstance(cast("Any", qmodel), QuantizedModel):
            raise TypeError(
                f"exact: expected the quantized model as the forward's first argument, got {brief(qmodel)}. Call "
                "forward(qmodel, x)."
            )
        with stage("exact forward: the first call compiles"):
            view = evaluation_copy(qmodel)
            derived = derive(view, inputs, None)
            reals = view(*inputs)
            mesh = explicit_mesh((reals, inputs))
            with automatic(mesh):
                value = _value(derived, *untyped((jax.lax.stop_gradient(inputs_of(derived.graph(), inputs)), reals)))
            return value if mesh is None else typed(value, jax.tree.map(spec_of, jax.tree.map(jax.typeof, reals)), mesh)

    @with_transfers
    def constants(qmodel: QuantizedModel) -> DerivedConstants:
        check_quantized(qmodel, "exact(...).constants", numbers=False)
        with stage("constants of the exact forward"):
            return derive(evaluation_copy(qmodel), args, _fingerprint(qmodel))

    @with_transfers
    def check(constants: DerivedConstants, qmodel: QuantizedModel) -> None:
        check_quantized(qmodel, "exact(...).check", numbers=False)
        _check_maker(constants, maker)
        if isinstance(constants.fingerprint, Tracer):
            raise TypeError("exact(...).check: expected constants with known numbers. Call it outside of jit.")
        compare(tuple(dict(plan.quantizers)), plan.fingerprint, qmodel.plan.fingerprint)
        own = jax.jit(_fingerprint_of_arrays)(_numbers(qmodel))
        if not np.array_equal(own, constants.fingerprint):
            raise ValueError(
                "exact: these constants are stale: they were derived from other parameters than the model has now. "
                "Derive them again after each update: constants = forward.constants(qmodel)."
            )

    plan = qmodel.plan
    made = cast("Any", forward)
    made.constants, made.check = constants, check
    return made


def _call(constants: DerivedConstants, inputs: tuple[Any, ...]) -> Any:
    return constants.call(inputs)


def _check_maker(constants: DerivedConstants, maker: object) -> None:
    if not constants.made_by(maker):
        raise ValueError(
            "exact: these constants belong to another forward: qjax.exact was called with another sample, recipe or "
            "target for them. Derive them with this one: forward.constants(qmodel)."
        )


def _numbers(qmodel: QuantizedModel) -> list[Any]:
    """The arrays of a model, without keys of random numbers."""
    leaves = jax.tree.leaves(nnx.state(qmodel))
    return [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def _fingerprint_of_arrays(arrays: list[Any]) -> jax.Array:
    mesh = explicit_mesh(arrays)
    with automatic(mesh):
        return fingerprint_of(untyped(arrays))


def _fingerprint(qmodel: QuantizedModel) -> jax.Array:
    return _fingerprint_of_arrays(_numbers(qmodel))


def _value(derived: DerivedConstants, arrays: list[Any], reals: Any) -> Any:
    """The outputs of the program on float inputs, with the gradients of the model's own outputs, `reals`."""
    value, wraps = derived.results(arrays)
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
