"""Collects the parts of a model that the recipe keeps in float, and makes one node per result of each part.

An equation in a module under `qjax.FLOAT`, `Dynamic` or `WeightFormat` is not lowered but recorded with its inputs.
Where a result reaches a quantizer or leaves the model, everything that it depends on becomes the program of one node.

    codes x  ->  [ dequantize, softplus, multiply, quantize ]  ->  codes y         one node with a float program
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from qjax import ops
from qjax.graph.ir import Graph, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.numerics.calls import called_program
from qjax.ops import float_programs
from qjax.ops.dynamic_dot import RunTimeCodes
from qjax.targets import Target
from qjax.tracing import Equation, Value
from qjax.tracing.composite import Computed

_PART = "qjax_part_"
"""Marks the equation of the program to which an equation of a float part's jaxpr belongs, for errors."""

_PASSED = "passed"


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """An equation that stays in float, with the lowered form of each of its inputs."""

    eqn: Equation
    found: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Float:
    """One result of a call."""

    call: Call
    index: int

    @property
    def eqn(self) -> Equation:
        """The equation that computes it."""
        return self.call.eqn


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An input of a float part. found: its lowered form. shape, dtype: of the traced value."""

    found: Any
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The program of a float part, and its inputs: data in order, constants by role."""

    attributes: dict[str, Any]
    data: tuple[Leaf, ...]
    constants: dict[str, Any]


def calls(eqn: Equation, found: Sequence[Any]) -> list[Float]:
    """The float results of an equation."""
    call = Call(eqn, tuple(found))
    return [Float(call, index) for index in range(len(eqn.outputs))]


def passed(eqn: Equation, value: Value, found: Any) -> Float:
    """A tensor as a float result, through an equation that changes nothing.

    eqn: provides the place in the user's code. value: the tensor in the program. found: its lowered form.
    """
    same = dataclasses.replace(eqn, primitive=_PASSED, inputs=(value,), outputs=(value,), params={}, body=None)
    same = dataclasses.replace(same, source=Computed((eqn,), (value,), (value,)))
    return Float(Call(same, (found,)), 0)


def passing(result: Float) -> Any:
    """The tensor of a result that `passed` made; None for any other result."""
    return result.call.found[0] if result.eqn.primitive == _PASSED else None


def program_of(result: Float, is_constant: Any) -> Program:
    """Collect everything that a result depends on as a program of `ops.float_programs`.

    is_constant: tells which inputs are constants, whose `value` is an array, a tracer or a `jax.ShapeDtypeStruct`.

    Raises:
      ConversionError: a primitive has no step in such programs.
    """
    order, leaves = _order_calls(result)
    places = {call: index for index, call in enumerate(order)}
    data = tuple(leaf for leaf in leaves if not is_constant(leaf.found))
    fixed = tuple(leaf for leaf in leaves if is_constant(leaf.found))

    def compute(data_values: list[Any], fixed_values: list[Any]) -> Any:
        known = {id(leaf.found): v for leaf, v in zip((*data, *fixed), (*data_values, *fixed_values), strict=True)}
        results: dict[Call, list[Any]] = {}
        for call in order:
            given = [results[f.call][f.index] if isinstance(f, Float) else known[id(f)] for f in call.found]
            with jax.named_scope(f"{_PART}{places[call]}"):
                results[call] = call.eqn.bind(*given)
        return results[result.call][result.index]

    shapes = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in part] for part in (data, fixed)]
    closed = jax.make_jaxpr(compute)(*shapes)
    writer = _Writer([call.eqn for call in order])
    operands = [["value", index] for index in range(len(data))]
    roles = [f"constant{index}" for index in range(len(fixed))]
    operands += [["constant", role, str(leaf.dtype)] for role, leaf in zip(roles, fixed, strict=True)]
    writer.count = len(data)
    (out,) = writer.read(closed.jaxpr, closed.consts, operands)
    if out[0] != "value":
        raise ConversionError(
            "a float part whose result is constant; remove its qjax.FLOAT or qjax.Dynamic.", where=result.eqn.where
        )
    constants = {role: leaf.found.value for role, leaf in zip(roles, fixed, strict=True)} | writer.constants
    # Drop constants that only a gradient needs, such as the float values of a weight that is multiplied as codes.
    read = {first for _, operands, _ in writer.steps for kind, first, *_ in operands if kind == "constant"}
    constants = {role: value for role, value in constants.items() if role in read}
    attributes = {
        "program": writer.steps,
        "results": [out[1]],
        "dtypes": [str(leaf.dtype) for leaf in data],
        "batch": None,
    }
    return Program(attributes, data, {role: _storable(value) for role, value in constants.items()})


def _order_calls(result: Float) -> tuple[list[Call], list[Leaf]]:
    """The calls that a result needs, in execution order, and their inputs from outside."""
    order: list[Call] = []
    leaves: dict[int, Leaf] = {}
    seen: set[Call] = set()
    waiting: list[tuple[Call, bool]] = [(result.call, False)]
    while waiting:
        call, ready = waiting.pop()
        if ready:
            order.append(call)
            continue
        if call in seen:
            continue
        seen.add(call)
        waiting.append((call, True))
        for value, found in zip(call.eqn.inputs, call.found, strict=True):
            if isinstance(found, Float):
                waiting.append((found.call, False))
            else:
                leaves.setdefault(id(found), Leaf(found, value.shape, value.dtype))
    return order, list(leaves.values())


class _Writer:
    """Flattens a jaxpr into steps. parts: the equations that it was made from, one after the other."""

    def __init__(self, parts: Sequence[Equation]) -> None:
        self.parts = parts
        self.eqn = parts[-1]
        self.steps: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.count = 0

    def read(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The operands that correspond to a jaxpr's outputs."""
        env: dict[object, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            role = f"captured{len(self.constants)}"
            self.constants[role] = value
            env[variable] = ["constant", role, str(variable.aval.dtype)]

        def get(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return env[atom]
            if np.shape(atom.val):
                role = f"captured{len(self.constants)}"
                self.constants[role] = np.asarray(atom.val)
                return ["constant", role, str(atom.aval.dtype)]
            number = np.asarray(atom.val)
            value = bool(number) if number.dtype == np.bool_ else number.item() if number.dtype.kind in "iu" else None
            return ["literal", float_programs.number(float(number)) if value is None else value, str(atom.aval.dtype)]

        platforms: dict[object, int] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "platform_index":
                platforms[eqn.outvars[0]] = plainest(eqn.params)
                continue
            if eqn.primitive.name == "cond" and eqn.invars[0] in platforms:
                branch = eqn.params["branches"][platforms[eqn.invars[0]]]
                outputs = self.read(branch.jaxpr, branch.consts, [get(atom) for atom in eqn.invars[1:]])
                env.update(zip(eqn.outvars, outputs, strict=True))
                continue
            inputs = [get(atom) for atom in eqn.invars]
            if part := re.search(rf"{_PART}(\d+)", str(eqn.source_info.name_stack)):
                self.eqn = self.parts[int(part[1])]
            inner = float_program(eqn)
            if inner is not None:
                outputs = self.read(inner.jaxpr, inner.consts, inputs)
            else:
                outputs = self._step(eqn, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [get(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in ("stop_gradient", "optimization_barrier"):
            return inputs
        params = float_programs.encode(name, eqn.params)
        if params is None:
            raise ConversionError(
                f"{name!r} has no form in a float island. Known: {', '.join(sorted(float_programs.STEPS))}",
                "Return what flows into it from the model, and compute the rest from the graph's outputs.",
                where=self.eqn.where,
            )
        self.steps.append([name, inputs, params])
        first = self.count
        self.count += len(eqn.outvars)
        return [["value", first + index] for index in range(len(eqn.outvars))]


def float_program(eqn: JaxprEqn) -> Any:
    """The program that an equation calls; None if it is a step of its own."""
    if eqn.primitive.name == "qjax_layer":
        # The equation is kept whole for its integer form, so for a float program open it.
        return jax.make_jaxpr(eqn.params["layer"].function)(*(atom.aval for atom in eqn.invars))
    return called_program(eqn)


def _storable(value: Any) -> Any:
    """A constant in a dtype that graphs support; the program casts it back."""
    wanted = jnp.bool_ if value.dtype == jnp.bool_ else jnp.float32
    if value.dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16):
        wanted = value.dtype
    elif jnp.issubdtype(value.dtype, jnp.integer):
        wanted = jnp.int32
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, wanted)
    return value.astype(wanted)


def complete(graph: Graph, target: Target) -> Graph:
    """The graph with its float parts completed: scales of their inputs and outputs as constants, the target's formula.

    It runs after the passes, when the scales are known.

    Raises:
      ConversionError: the target's runtime lacks a product.
    """
    if not any(ops.get(node.op).reals for node in graph.nodes):
        return graph
    tensors, nodes = dict(graph.tensors), list(graph.nodes)
    for position, node in enumerate(nodes):
        op = ops.get(node.op)
        if not op.reals:
            continue
        if isinstance(op, RunTimeCodes):
            why = op.in_target(node.attributes, tensors[node.constants["kernel"]], target.dynamic)
            if why is not None:
                raise ConversionError(f"{why}. The target is {target.name!r}.", where=node.location)
            node = dataclasses.replace(node, attributes={**node.attributes, "dynamic": target.dynamic})
        constants = dict(node.constants)
        scales = {f"x_scale{i}": tensors[name].quantization for i, name in enumerate(node.inputs)}
        scales["y_scale"] = tensors[node.output].quantization
        scales |= {f"{role}_scale": tensors[name].quantization for role, name in node.constants.items()}
        for role, quantization in scales.items():
            if quantization is not None:
                name = f"{node.output}/{role}"
                tensors[name] = Tensor(name, tuple(np.shape(quantization.scale)), "float32", None, quantization.scale)
                constants[role] = name
        nodes[position] = dataclasses.replace(node, constants=constants)
    return graph.replace(nodes=tuple(nodes), tensors=tensors)


def free_attributes(node: Any, other: Any, inputs: Any, size: int, other_size: int) -> dict[str, Any]:
    """The attributes of a float part for any batch. inputs: shapes of each input in both traces. Raises ValueError."""
    program = float_programs.freed(node.attributes["program"], other.attributes["program"], size, other_size)
    batch = None
    for index, (a, b) in enumerate(inputs):
        for axis, (x, y) in enumerate(zip(a, b, strict=True)):
            if batch is None and x != y and x % size == 0:
                batch = [index, axis, x // size]
    return {**node.attributes, "program": program, "batch": batch}


def plainest(params: Mapping[str, Any]) -> int:
    """The branch to use, from the parameters of a `platform_index`: the one for no particular platform.

    All branches compute the same numbers, but the others are written for what XLA does fast on one platform.
    """
    return params["platforms"].index(None)
