"""Lowers the annotated program to the quantized graph, one node per equation.

Accumulators and the steps after them are separate nodes here, with float constants; `assign` folds them for a target.
An equation without an integer form is an error that names the primitive and the user's line.

    y = relu(x @ w + b)   ->   a = dot(x, w); c = add(a, b); d = relu(c); y = quantize(d)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.graph import float_parts
from qjax.graph.check import check
from qjax.graph.dead_code import remove_dead, remove_identities
from qjax.graph.ir import Graph, Tensor
from qjax.graph.structure import Call
from qjax.graph.unsupported import ConversionError as ConversionError
from qjax.lower.batch import free_batch
from qjax.lower.builder import Builder
from qjax.lower.builder import ParamsOf as ParamsOf
from qjax.lower.equations import equation
from qjax.lower.products import products_before_loops
from qjax.lower.quantizers import island_output, quantized
from qjax.lower.stacks import part_of, stack_of
from qjax.lower.values import Codes, Constant, Env, Found, Real, Step, get
from qjax.tracing import Annotation, Equation, Program


def lower(
    program: Program,
    annotation: Annotation,
    args: Sequence[Any],
    names: Sequence[str],
    params_of: ParamsOf,
) -> Graph:
    """Build the quantized graph.

    Args:
      args: per program input: the array of a constant (or a `jax.ShapeDtypeStruct` if only the structure is needed);
        ignored for data.
    """
    program, annotation = products_before_loops(program, annotation)
    builder = Builder(annotation, params_of)
    env, order = _inputs(builder, program, args, names)
    _Walk(builder).run(program, env, ())
    outputs, leaves = _outputs(builder, program, env)
    return Graph(
        builder.tensors,
        tuple(builder.nodes),
        # Float inputs that only a float part reads are inputs of the graph as well.
        tuple(name for name in order if name in builder.tensors),
        outputs,
        "",
        call=Call((), jax.tree.structure(leaves), leaves),
    )


def _inputs(builder: Builder, program: Program, args: Sequence[Any], names: Sequence[str]) -> tuple[Env, list[str]]:
    """The lowered form of the program's inputs, and the names of the data among them in order."""
    env: Env = {}
    order: list[str] = []
    for value, arg, name in zip(program.inputs, args, names, strict=True):
        if value in builder.annotation.constants:
            env[value] = Constant(arg)
            continue
        place = builder.annotation.values.get(value)
        order.append(name if place is None else place.label)
        if place is not None:
            env[value] = Codes(builder.on_grid(place.label, value.shape, place, ()))
            builder.inputs.append(place.label)
        elif value.is_float:
            env[value] = Real(name)
        else:
            builder.add(Tensor(name, value.shape, "bool" if value.dtype == np.bool_ else "int32"))
            builder.inputs.append(name)
            env[value] = Codes(name)
    return env, order


def _outputs(builder: Builder, program: Program, env: Env) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The tensors that the program returns; and for each output its position among them, or its constant."""
    outputs: list[str] = []
    leaves: list[Any] = []
    for value in program.outputs:
        found = get(env, value)
        if isinstance(found, float_parts.Float):
            found = island_output(builder, found, value)
        if isinstance(found, Codes):
            leaves.append(len(outputs))
            outputs.append(found.tensor)
        elif isinstance(found, Constant):
            leaves.append(_as_result(found.value))
        else:
            name = f" its input {found.name!r}" if isinstance(found, Real) else " what is not quantized"
            raise ConversionError(
                f"The model returns{name} as it is", "Return only what quantized operations compute, and constants."
            )
    return tuple(outputs), tuple(leaves)


def _as_result(value: Any) -> Any:
    """A constant in the form in which a graph returns it: float32, like all results; a structure is unchanged."""
    if not jax.dtypes.issubdtype(value.dtype, np.floating) or isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jnp.asarray(value, jnp.float32)


class _Walk:
    """Visits the equations in order, including the bodies of loops."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.evaluation = Evaluation()

    def run(self, program: Program, env: Env, step: Step) -> None:
        values = self.builder.annotation.values
        for eqn in program.equations:
            found = [get(env, value) for value in eqn.inputs]
            constants = [f for f in found if isinstance(f, Constant)]
            outputs: Sequence[Found]
            if len(constants) == len(found):
                outputs = self.evaluation.outputs(eqn, constants)
            elif eqn.body is not None:
                outputs = self._of_body(eqn, eqn.body, found, step)
            else:
                outputs = equation(self.builder, eqn, found, step)
            for value, output in zip(eqn.outputs, outputs, strict=True):
                env[value] = output
                place = values.get(value)
                if place is not None:
                    env[value] = quantized(self.builder, place, value, output, eqn, step)

    def _of_body(self, eqn: Equation, program: Program, found: list[Found], step: Step) -> list[Found]:
        """The lowered outputs of an equation with a body: remat is lowered once, a scan once per iteration."""
        if eqn.primitive == "remat":
            env: Env = dict(zip(program.inputs, found, strict=True))
            self.run(program, env, step)
            return [get(env, value) for value in program.outputs]
        return self._scan(eqn, program, found, step)

    def _scan(self, eqn: Equation, program: Program, found: list[Found], step: Step) -> list[Found]:
        builder = self.builder
        fixed, carried, length = eqn.params["num_consts"], eqn.params["num_carry"], eqn.params["length"]
        carry = list(found[fixed : fixed + carried])
        for index, f in enumerate(carry):
            place = builder.annotation.weights.get((eqn, fixed + index))
            if place is not None:
                carry[index] = quantized(builder, place, eqn.inputs[fixed + index], f, eqn, step)
        stacks: list[list[Found | None]] = [[None] * length for _ in eqn.outputs[carried:]]
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
        for iteration in order:
            here = (*step, iteration)
            parts = [part_of(builder, f, iteration, eqn, here) for f in found[fixed + carried :]]
            env: Env = {}
            for value, f in zip(program.inputs, [*found[:fixed], *carry, *parts], strict=True):
                env[value] = f
                place = builder.annotation.values.get(value)
                if place is not None:
                    env[value] = quantized(builder, place, value, f, eqn, here)
            self.run(program, env, here)
            outputs = [get(env, value) for value in program.outputs]
            carry = outputs[:carried]
            for stack, output in zip(stacks, outputs[carried:], strict=True):
                stack[iteration] = output
        return [*carry, *(stack_of(builder, stack, eqn, step) for stack in stacks)]


class Evaluation:
    """Runs equations; results that are the same in every iteration of a scan are computed once."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}

    def outputs(self, eqn: Equation, found: list[Constant]) -> list[Constant]:
        """The outputs of an equation whose inputs are all constants."""
        values = [f.value for f in found]
        key = (eqn, *map(id, values))
        if key not in self._results:
            # Keep the inputs alive, so that no other object can get their id.
            self._results[key] = values, _evaluate(eqn, values)
        return [Constant(result) for result in self._results[key][1]]


def _evaluate(eqn: Equation, values: list[Any]) -> list[Any]:
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eqn.outputs]
    return eqn.bind(*(jax.numpy.asarray(value) for value in values))


def quantized_graph(
    program: Program,
    annotation: Annotation,
    args: Sequence[Any],
    names: Sequence[str],
    params_of: ParamsOf,
    other: tuple[Program, Annotation, Sequence[Any]] | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> Graph:
    """The quantized graph of an annotated program; its constants may be traced.

    Args:
      other: the same model traced with another batch size, whose constants are `jax.ShapeDtypeStruct`; without it the
        graph is fixed to the batch size of `program`.
      sizes: the two batch sizes.
    """
    # Remove dead nodes first, because a loss that a layer computes on the side may depend on the batch size.
    graph = check(remove_dead(lower(program, annotation, args, names, params_of)))
    if other is not None:
        graph = check(free_batch(graph, remove_dead(lower(*other, names, params_of)), *sizes))
    return check(remove_dead(remove_identities(graph)))
