"""From the annotated program to the first graph, one node per equation.

Accumulators and the steps behind them are still separate nodes here and carry real constants; the passes fold
them. What has no integer form is an error that names the primitive and the user's line.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qjax.export.ir import Array, Graph, Node, Quantization, Tensor
from qjax.export.unsupported import ConversionError as ConversionError
from qjax.export.unsupported import stacked, unsupported, where
from qjax.export.weights import weight_tensor
from qjax.numerics.affine import QParams
from qjax.ops import Op
from qjax.targets import Target
from qjax.tracing import Annotation, Equation, Place, Program, Value

ParamsOf = Callable[[Place, tuple[int, ...], Any], QParams]
"""(place, indices of the scan iterations, the tensor if it is a constant) -> parameters."""

QUANTIZE = "quantize"
"""The node that puts an accumulator on a grid, until a pass folds it into the accumulator's producer."""


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


@dataclasses.dataclass(frozen=True)
class _Codes:
    tensor: str


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    tensor: str
    channels: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Real:
    """A float input that no quantizer has met yet."""

    name: str


def lower(
    program: Program,
    annotation: Annotation,
    args: Sequence[Any],
    names: Sequence[str],
    params_of: ParamsOf,
    target: Target,
) -> Graph:
    """Build the first graph.

    Args:
      args: per program input: the array of a constant (or, when only the structure is wanted, a
        `jax.ShapeDtypeStruct`); ignored for data.
    """
    return _Lowering(annotation, params_of, target).run(program, args, names)


class _Lowering:
    def __init__(self, annotation: Annotation, params_of: ParamsOf, target: Target) -> None:
        self.annotation = annotation
        self.params_of = params_of
        self.target = target
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.inputs: list[str] = []
        self.grids: dict[tuple[str, tuple[int, ...]], tuple[Quantization, str]] = {}

    def run(self, program: Program, args: Sequence[Any], names: Sequence[str]) -> Graph:
        env: dict[Value, Any] = {}
        for value, arg, name in zip(program.inputs, args, names, strict=True):
            if value in self.annotation.constants:
                env[value] = _Constant(arg)
                continue
            place = self.annotation.values.get(value)
            if place is not None:
                env[value] = _Codes(self._tensor(place.label, value, place, ()))
                self.inputs.append(place.label)
            elif value.is_float:
                env[value] = _Real(name)
            else:
                self._add(Tensor(name, value.shape, "int32"))
                self.inputs.append(name)
                env[value] = _Codes(name)
        self._program(program, env, ())
        outputs: list[str] = []
        for value in program.outputs:
            found = self._get(env, value)
            if isinstance(found, _Codes):
                outputs.append(found.tensor)
        return Graph(
            self.tensors,
            tuple(self.nodes),
            tuple(self.inputs),
            tuple(outputs),
            self.target.name,
            quantization=self.target.quantize,
        )

    # ------------------------------------------------------------------ equations

    def _program(self, program: Program, env: dict[Value, Any], step: tuple[int, ...]) -> None:
        for eqn in program.equations:
            found = [self._get(env, value) for value in eqn.inputs]
            if all(isinstance(f, _Constant) for f in found):
                for value, result in zip(eqn.outputs, self._evaluate(eqn, found), strict=True):
                    env[value] = _Constant(result)
                continue
            if eqn.body is not None:
                outputs = self._body(eqn, eqn.body, found, step)
            else:
                outputs = self._equation(eqn, found, step)
            for value, output in zip(eqn.outputs, outputs, strict=True):
                env[value] = output
                place = self.annotation.values.get(value)
                if place is not None:
                    env[value] = self._quantized(place, value, output, eqn, step)

    def _equation(self, eqn: Equation, found: list[Any], step: tuple[int, ...]) -> list[Any]:
        reading = self.annotation.ops.get(eqn)
        if reading is None or any(isinstance(f, _Real) for f in found):
            if eqn.primitive == "convert_element_type" and not eqn.inputs[0].is_float and not eqn.outputs[0].is_float:
                return found
            raise unsupported(eqn, self.annotation.is_constant(eqn))
        op, mode = reading
        constant = self.annotation.is_constant(eqn)
        if op.name == "cast":
            return [found[0]]
        if op.name == "dropout" or (op.name == "batch_norm" and len(eqn.outputs) > 1):
            raise unsupported(eqn)
        if mode == "permute":
            return [self._permuted(eqn, found[0])]
        if mode == "start":
            data = op.data(eqn, constant)[0]
            acc = self._node("rescale", eqn, [found[data].tensor], {}, {}, step)
            return [self._chain(op, eqn, constant, [*found[:data], acc, *found[data + 1 :]], step)]
        if mode == "chain":
            return [self._chain(op, eqn, constant, found, step)]
        if mode == "grid":
            return self._grid(op, eqn, constant, found, step)
        return [self._producer(op, eqn, constant, found, step)]

    def _producer(
        self, op: Op, eqn: Equation, constant: Sequence[bool], found: list[Any], step: tuple[int, ...]
    ) -> _Accumulator:
        attributes = op.attributes(eqn)
        weight = op.weight(eqn, constant)
        constants: dict[str, str] = {}
        channels: list[list[int]] = []
        if op.name in ("dot", "conv"):
            channels = op.channels(eqn, weight) if weight is not None else []
            attributes |= {
                "weight": weight,
                "channels": channels,
                "rank": len(eqn.out_shapes[0]),
                "permutation": None,
            }
        inputs = [found[i].tensor for i in op.data(eqn, constant) if i != weight]
        if weight is not None:
            constants["kernel"] = self._kernel(eqn, weight, found[weight].value, step)
        acc = self._node(op.name, eqn, inputs, constants, attributes, step)
        return _Accumulator(acc.tensor, tuple((r, w) for r, w in channels))

    def _chain(
        self, op: Op, eqn: Equation, constant: Sequence[bool], found: list[Any], step: tuple[int, ...]
    ) -> _Accumulator:
        data = op.data(eqn, constant)[0]
        attributes = op.attributes(eqn)
        if attributes.get("step") == "sub" and data == 1:
            attributes["reversed"] = True
        constants: dict[str, str] = {}
        for role, index in op.chain_constants(eqn, constant).items():
            constants[role] = self._constant(f"{self._name(eqn, step)}/{role}", found[index].value)
        acc = self._node(op.name, eqn, [found[data].tensor], constants, attributes, step)
        return dataclasses.replace(found[data], tensor=acc.tensor)

    def _grid(
        self, op: Op, eqn: Equation, constant: Sequence[bool], found: list[Any], step: tuple[int, ...]
    ) -> list[Any]:
        attributes = op.attributes(eqn)
        constants: dict[str, str] = {}
        weight = op.weight(eqn, constant)
        if weight is not None:
            kernel = self._kernel(eqn, weight, found[weight].value, step)
            constants["kernel"] = kernel
            inputs, quantization = [found[0].tensor], self.tensors[kernel].quantization
        else:
            for role, index in op.chain_constants(eqn, constant).items():
                constants[role] = self._constant(f"{self._name(eqn, step)}/{role}", found[index].value)
            inputs: list[str] = []
            for index in op.data(eqn, constant):
                if isinstance(found[index], _Constant):
                    inputs.append(self._kernel(eqn, index, found[index].value, step))
                else:
                    inputs.append(found[index].tensor)
            quantization = self.tensors[inputs[0]].quantization
        outputs: list[Any] = []
        for index, value in enumerate(eqn.outputs):
            extra = {"index": index} if len(eqn.outputs) > 1 else {}
            source = self.tensors[constants["kernel"] if weight is not None else inputs[0]]
            name = self._fresh(self._name(eqn, step))
            self._add(Tensor(name, value.shape, source.dtype, quantization))
            self.nodes.append(
                Node(name, op.name, tuple(inputs), name, constants, {**attributes, **extra}, eqn.location)
            )
            outputs.append(_Codes(name))
        return outputs

    def _quantized(self, place: Place, value: Value, found: Any, eqn: Equation, step: tuple[int, ...]) -> _Codes:
        if isinstance(found, _Codes):
            found = self._node("rescale", eqn, [found.tensor], {}, {}, step)
        if isinstance(found, _Stack):
            raise stacked(found.eqn)
        if not isinstance(found, _Accumulator):
            raise unsupported(eqn)
        label = self._fresh(_stepped(place.label, step))
        output = self._tensor(label, value, place, step)
        self.nodes.append(Node(label, QUANTIZE, (found.tensor,), output, {}, {}, eqn.location))
        return _Codes(output)

    def _permuted(self, eqn: Equation, found: _Accumulator) -> _Accumulator:
        permutation = list(eqn.params["permutation"])
        index = next(i for i, node in enumerate(self.nodes) if node.output == found.tensor)
        node = self.nodes[index]
        before = node.attributes["permutation"]
        total = permutation if before is None else [before[axis] for axis in permutation]
        channels = tuple((permutation.index(r), w) for r, w in found.channels)
        attributes = {**node.attributes, "permutation": total, "channels": [list(pair) for pair in channels]}
        self.nodes[index] = dataclasses.replace(node, attributes=attributes)
        self.tensors[found.tensor] = dataclasses.replace(self.tensors[found.tensor], shape=eqn.out_shapes[0])
        return _Accumulator(found.tensor, channels)

    # ------------------------------------------------------------------ bodies

    def _body(self, eqn: Equation, body: Program, found: list[Any], step: tuple[int, ...]) -> list[Any]:
        if eqn.primitive == "remat":
            env: dict[Value, Any] = dict(zip(body.inputs, found, strict=True))
            self._program(body, env, step)
            return [self._get(env, value) for value in body.outputs]
        fixed, carried, length = eqn.params["num_consts"], eqn.params["num_carry"], eqn.params["length"]
        carry = found[fixed : fixed + carried]
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
        for iteration in order:
            slices = [self._slice(f, iteration, eqn) for f in found[fixed + carried :]]
            env = {}
            here = (*step, iteration)
            for value, f in zip(body.inputs, [*found[:fixed], *carry, *slices], strict=True):
                env[value] = f
                place = self.annotation.values.get(value)
                if place is not None:
                    env[value] = self._quantized(place, value, f, eqn, here)
            self._program(body, env, here)
            outputs = [self._get(env, value) for value in body.outputs]
            carry = outputs[:carried]
        stacks = [_Stack(eqn) for _ in eqn.outputs[carried:]]
        return [*carry, *stacks]

    def _slice(self, found: Any, iteration: int, eqn: Equation) -> Any:
        if not isinstance(found, _Constant):
            raise ConversionError(
                f"{where(eqn)}: a scan over the leading axis of an activation has no integer form yet. "
                "Write it as a Python loop over slices."
            )
        if isinstance(found.value, jax.ShapeDtypeStruct):
            return _Constant(jax.ShapeDtypeStruct(found.value.shape[1:], found.value.dtype))
        return _Constant(found.value[iteration])

    # ------------------------------------------------------------------ tensors

    def _get(self, env: dict[Value, Any], value: Value) -> Any:
        found = _Constant(value.constant) if value.constant is not None else env[value]
        if isinstance(found, _Stack):
            raise stacked(found.eqn)
        return found

    def _evaluate(self, eqn: Equation, found: list[Any]) -> list[Any]:
        if any(isinstance(f.value, jax.ShapeDtypeStruct) for f in found):
            return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eqn.outputs]
        if eqn.body is not None:
            return _run_constant(eqn, [f.value for f in found])
        return eqn.bind(*(jax.numpy.asarray(f.value) for f in found))

    def _kernel(self, eqn: Equation, index: int, value: Any, step: tuple[int, ...]) -> str:
        place = self.annotation.weights[eqn, index]
        name = self._fresh(_stepped(place.label, step))
        self._add(weight_tensor(name, place, value, self.params_of(place, step, value), eqn))
        return name

    def _constant(self, name: str, value: Any) -> str:
        name = self._fresh(name)
        data = None if isinstance(value, jax.ShapeDtypeStruct) else value
        self._add(Tensor(name, tuple(np.shape(value)), str(value.dtype), None, data))
        return name

    def _tensor(self, name: str, value: Value, place: Place, step: tuple[int, ...]) -> str:
        # one object per quantizer: later passes see that two tensors stand on one grid, also inside a trace
        if (place.name, step) not in self.grids:
            params = self.params_of(place, step, None)
            spec = params.spec
            grid = Quantization(params.scale, params.integer_zero_point(), spec.qmin, spec.qmax)
            self.grids[place.name, step] = grid, str(spec.dtype)
        quantization, dtype = self.grids[place.name, step]
        self._add(Tensor(name, value.shape, dtype, quantization))
        return name

    def _node(
        self,
        op: str,
        eqn: Equation,
        inputs: Sequence[str],
        constants: dict[str, str],
        attributes: dict[str, Any],
        step: tuple[int, ...],
    ) -> _Accumulator:
        name = self._fresh(f"{self._name(eqn, step)}/accumulator")
        self._add(Tensor(name, eqn.out_shapes[0], "int32"))
        self.nodes.append(Node(name, op, tuple(inputs), name, constants, attributes, eqn.location))
        return _Accumulator(name, ())

    def _name(self, eqn: Equation, step: tuple[int, ...]) -> str:
        return _stepped(f"{eqn.scope}/{eqn.primitive}" if eqn.scope else eqn.primitive, step)

    def _fresh(self, name: str) -> str:
        unique, count = name, 1
        while unique in self.tensors:
            count += 1
            unique = f"{name}#{count}"
        return unique

    def _add(self, tensor: Tensor) -> None:
        self.tensors[tensor.name] = tensor


@dataclasses.dataclass(frozen=True)
class _Stack:
    eqn: Equation


def _run_constant(eqn: Equation, values: list[Any]) -> list[Array]:
    return eqn.bind(*(jax.numpy.asarray(v) for v in values))


def _stepped(name: str, step: tuple[int, ...]) -> str:
    return name + "".join(f"[{i}]" for i in step)
