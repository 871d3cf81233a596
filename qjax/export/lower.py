"""From the annotated program to the first graph, one node per equation.

Accumulators and the steps behind them are still separate nodes here and carry real constants; the passes fold
them. What has no integer form is an error that names the primitive and the user's line.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qjax.export import islands
from qjax.export.ir import Array, Graph, Node, Quantization, Tensor
from qjax.export.unsupported import ConversionError as ConversionError
from qjax.export.unsupported import stacked, unsupported, where
from qjax.export.weights import weight_tensor
from qjax.numerics._namespace import traced
from qjax.numerics.affine import QParams
from qjax.ops import Op, island
from qjax.ops.grouped_dot import layout
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
        self.labels = {place.label for place in annotation.values.values()}
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.counts: dict[str, int] = {}
        self.inputs: list[str] = []
        self.grids: dict[tuple[str, tuple[int, ...]], tuple[Quantization, str]] = {}
        self.evaluated: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        self.kernels: dict[tuple[Equation, int, tuple[int, ...]], str] = {}

    def run(self, program: Program, args: Sequence[Any], names: Sequence[str]) -> Graph:
        env: dict[Value, Any] = {}
        order: list[str] = []
        for value, arg, name in zip(program.inputs, args, names, strict=True):
            if value in self.annotation.constants:
                env[value] = _Constant(arg)
                continue
            place = self.annotation.values.get(value)
            order.append(name if place is None else place.label)
            if place is not None:
                env[value] = _Codes(self._tensor(place.label, value.shape, place, ()))
                self.inputs.append(place.label)
            elif value.is_float:
                env[value] = _Real(name)
            else:
                self._add(Tensor(name, value.shape, "bool" if value.dtype == np.bool_ else "int32"))
                self.inputs.append(name)
                env[value] = _Codes(name)
        self._program(program, env, ())
        outputs: list[str] = []
        for value in program.outputs:
            found = self._get(env, value)
            if isinstance(found, islands.Float):
                found = self._island_output(found, value)
            if isinstance(found, _Codes):
                outputs.append(found.tensor)
        return Graph(
            self.tensors,
            tuple(self.nodes),
            # reals that only an island reads are inputs as well
            tuple(name for name in order if name in self.tensors),
            tuple(outputs),
            self.target.name,
            quantization=self.target.quantize,
        )

    # ------------------------------------------------------------------ equations

    def _program(self, program: Program, env: dict[Value, Any], step: tuple[int, ...]) -> None:
        for eqn in program.equations:
            found = [self._get(env, value) for value in eqn.inputs]
            if all(isinstance(f, _Constant) for f in found):
                outputs = [_Constant(result) for result in self._evaluate(eqn, found)]
            elif eqn.body is not None:
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
        if eqn in self.annotation.floats or any(isinstance(f, islands.Float) for f in found):
            return list(islands.calls(eqn, found))
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
        if mode == "integer":
            return self._integers(op, eqn, constant, found, step)
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
        inputs = self._operands(op, eqn, constant, found, step)
        if weight is not None:
            constants["kernel"] = self._kernel(eqn, weight, found[weight].value, step)
            if len(self.tensors[constants["kernel"]].shape) > len(eqn.in_shapes[weight]):
                return self._grouped(eqn, weight, inputs, constants["kernel"], channels, step)
        for role, index in op.chain_constants(eqn, constant).items():
            constants[role] = self._constant(f"{self._name(eqn, step)}/{role}", found[index].value)
        acc = self._node(op.name, eqn, inputs, constants, attributes, step)
        return _Accumulator(acc.tensor, tuple((r, w) for r, w in channels))

    def _grouped(
        self,
        eqn: Equation,
        weight: int,
        inputs: list[str],
        kernel: str,
        channels: list[list[int]],
        step: tuple[int, ...],
    ) -> _Accumulator:
        """A product whose weight has a scale for every group of the summed axis."""
        weights = self.tensors[kernel]
        assert weights.quantization is not None
        place = self.annotation.weights[eqn, weight]
        shape = jax.ShapeDtypeStruct(eqn.in_shapes[weight], np.dtype(np.float32))
        try:
            attributes = layout(eqn, weight, self.params_of(place, self._own(place, step), shape), channels)
        except ValueError as error:
            raise ConversionError(f"{where(eqn)}: weight {place.name!r} has {error}.") from None
        axes = weights.quantization.axes
        sizes = [n if axis in axes else 1 for axis, n in enumerate(weights.shape)]
        scale = self._constant(f"{kernel}/scale", weights.quantization.scale.reshape(tuple(n or 1 for n in sizes)))
        acc = self._node("grouped_dot", eqn, inputs, {"weights": kernel, "weight_scale": scale}, attributes, step)
        return _Accumulator(acc.tensor, tuple((r, w) for r, w in channels))

    def _operands(
        self, op: Op, eqn: Equation, constant: Sequence[bool], found: list[Any], step: tuple[int, ...]
    ) -> list[str]:
        """The tensors that flow into a node, in the equation's order: codes, and integers that stand for themselves."""
        integers, weight = op.integers(eqn, constant), op.weight(eqn, constant)
        names: list[str] = []
        for index in sorted({*op.data(eqn, constant), *integers} - {weight}):
            value = found[index]
            if not isinstance(value, _Constant):
                names.append(value.tensor)
            elif index in integers or not eqn.inputs[index].is_float:
                wrong = None if _structure(value.value) else op.refuses(eqn, index, np.asarray(value.value))
                if wrong is not None:
                    raise ConversionError(f"{where(eqn)}: {wrong}.")
                names.append(self._integer_constant(f"{self._name(eqn, step)}/operand{index}", value.value))
            else:
                names.append(self._kernel(eqn, index, value.value, step))
        return names

    def _integers(
        self, op: Op, eqn: Equation, constant: Sequence[bool], found: list[Any], step: tuple[int, ...]
    ) -> list[Any]:
        """A node per output; integers and booleans have no grid."""
        inputs = self._operands(op, eqn, constant, found, step)
        constants: dict[str, str] = {}
        for role, index in op.chain_constants(eqn, constant).items():
            constants[role] = self._constant(f"{self._name(eqn, step)}/{role}", found[index].value)
        outputs: list[Any] = []
        for index, value in enumerate(eqn.outputs):
            extra = {"index": index} if len(eqn.outputs) > 1 else {}
            name = self._unlabelled(self._name(eqn, step))
            self._add(Tensor(name, value.shape, "bool" if value.dtype == np.bool_ else "int32"))
            attributes = {**op.attributes(eqn), **extra}
            self.nodes.append(Node(name, op.name, tuple(inputs), name, constants, attributes, eqn.location))
            outputs.append(_Codes(name))
        return outputs

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
            source = self.tensors[self._kernel(eqn, weight, found[weight].value, step)]
            constants["kernel"] = source.name
            inputs, quantization = self._operands(op, eqn, constant, found, step), source.quantization
        else:
            for role, index in op.chain_constants(eqn, constant).items():
                constants[role] = self._constant(f"{self._name(eqn, step)}/{role}", found[index].value)
            inputs = self._operands(op, eqn, constant, found, step)
            source = next(self.tensors[name] for name in inputs if self.tensors[name].quantization is not None)
            quantization = source.quantization
        outputs: list[Any] = []
        for index, value in enumerate(eqn.outputs):
            extra = {"index": index} if len(eqn.outputs) > 1 else {}
            name = self._unlabelled(self._name(eqn, step))
            if value.is_float:
                self._add(Tensor(name, value.shape, source.dtype, quantization))
            else:
                # what a selection tells beside its codes: the indices of a top_k
                self._add(Tensor(name, value.shape, "int32"))
            self.nodes.append(
                Node(name, op.name, tuple(inputs), name, constants, {**attributes, **extra}, eqn.location)
            )
            outputs.append(_Codes(name))
        return outputs

    def _quantized(self, place: Place, value: Value, found: Any, eqn: Equation, step: tuple[int, ...]) -> _Codes:
        if isinstance(found, _Constant):
            return self._filled(place, value, found.value, eqn, step)
        if isinstance(found, _Stack):
            return self._joined(place, value, found, eqn, step)
        if isinstance(found, islands.Float):
            label = self._fresh(self._label(place, step))
            return self._island(found, self._tensor(label, value.shape, place, step))
        if isinstance(found, _Codes):
            found = self._node("rescale", eqn, [found.tensor], {}, {}, step)
        if not isinstance(found, _Accumulator):
            raise unsupported(eqn)
        label = self._fresh(self._label(place, step))
        output = self._tensor(label, value.shape, place, step)
        self.nodes.append(Node(label, QUANTIZE, (found.tensor,), output, {}, {}, eqn.location))
        return _Codes(output)

    def _filled(self, place: Place, value: Value, number: Any, eqn: Equation, step: tuple[int, ...]) -> _Codes:
        """A constant where codes are expected, such as the zeros that a loop starts from."""
        if not self.inputs:
            raise unsupported(eqn)
        label = self._fresh(self._label(place, step))
        output = self._tensor(label, value.shape, place, step)
        params = self.params_of(place, self._own(place, step), None)
        codes = weight_tensor(self._fresh(f"{label}/value"), place, number, params, eqn)
        self._add(codes)
        attributes = {"shape": list(value.shape), "times": 1}
        self.nodes.append(
            Node(label, "fill", (self.inputs[0],), output, {"value": codes.name}, attributes, eqn.location)
        )
        return _Codes(output)

    def _island(self, found: islands.Float, output: str) -> _Codes:
        """A node that computes a real result, and puts it on the output's grid where it has one."""
        program = islands.program_of(found, lambda f: isinstance(f, _Constant))
        inputs: list[str] = []
        for leaf in program.data:
            if isinstance(leaf.found, _Real) and leaf.found.name not in self.tensors:
                self._add(Tensor(leaf.found.name, leaf.shape, "float32"))
            inputs.append(leaf.found.name if isinstance(leaf.found, _Real) else leaf.found.tensor)
        constants = {role: self._constant(f"{output}/{role}", value) for role, value in program.constants.items()}
        self.nodes.append(
            Node(output, island.NAME, tuple(inputs), output, constants, program.attributes, found.eqn.location)
        )
        return _Codes(output)

    def _island_output(self, found: islands.Float, value: Value) -> _Codes:
        """A result that leaves the model, or that integers read, as it is."""
        dtype = "bool" if value.dtype == np.bool_ else "float32" if value.is_float else "int32"
        name = self._fresh(f"{found.eqn.scope}/output" if found.eqn.scope else "output")
        self._add(Tensor(name, value.shape, dtype))
        return self._island(found, name)

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
        carry = list(found[fixed : fixed + carried])
        for index, f in enumerate(carry):
            place = self.annotation.weights.get((eqn, fixed + index))
            if place is not None:
                carry[index] = self._quantized(place, eqn.inputs[fixed + index], f, eqn, step)
        stacks: list[list[Any]] = [[None] * length for _ in eqn.outputs[carried:]]
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
        for iteration in order:
            here = (*step, iteration)
            slices = [self._slice(f, iteration, eqn, here) for f in found[fixed + carried :]]
            env = {}
            for value, f in zip(body.inputs, [*found[:fixed], *carry, *slices], strict=True):
                env[value] = f
                place = self.annotation.values.get(value)
                if place is not None:
                    env[value] = self._quantized(place, value, f, eqn, here)
            self._program(body, env, here)
            outputs = [self._get(env, value) for value in body.outputs]
            carry = outputs[:carried]
            for stack, output in zip(stacks, outputs[carried:], strict=True):
                stack[iteration] = output
        return [*carry, *(self._stacked(stack, eqn, step) for stack in stacks)]

    def _slice(self, found: Any, iteration: int, eqn: Equation, step: tuple[int, ...]) -> Any:
        """One iteration's part of what a scan runs along."""
        if isinstance(found, _Constant):
            if isinstance(found.value, jax.ShapeDtypeStruct):
                return _Constant(jax.ShapeDtypeStruct(found.value.shape[1:], found.value.dtype))
            return _Constant(found.value[iteration])
        if not isinstance(found, _Codes):
            return found
        whole = self.tensors[found.tensor]
        shape, rank = whole.shape[1:], len(whole.shape)
        bounds = {
            "start": [iteration] + [0] * (rank - 1),
            "limit": [iteration + 1, *shape],
            "strides": [1] * rank,
        }
        part = self._moved("slice", whole, (1, *shape), [whole.name], bounds, eqn, step)
        return _Codes(self._moved("reshape", whole, shape, [part], {"shape": list(shape)}, eqn, step))

    def _stacked(self, parts: list[Any], eqn: Equation, step: tuple[int, ...]) -> Any:
        """What a scan stacks, one part per iteration."""
        if parts and all(isinstance(part, _Constant) for part in parts):
            values = [part.value for part in parts]
            if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
                return _Constant(jax.ShapeDtypeStruct((len(parts), *values[0].shape), values[0].dtype))
            return _Constant(jax.numpy.stack([jax.numpy.asarray(value) for value in values]))
        if parts and all(isinstance(part, _Codes) for part in parts):
            tensors = [self.tensors[part.tensor] for part in parts]
            if all(tensor.quantization is tensors[0].quantization for tensor in tensors):
                return _Codes(self._concatenated(tensors, eqn, step))
        return _Stack(eqn, tuple(parts))

    def _joined(self, place: Place, value: Value, found: "_Stack", eqn: Equation, step: tuple[int, ...]) -> _Codes:
        """Parts that stand on grids of their own, brought onto one."""
        parts: list[Tensor] = []
        for iteration, part in enumerate(found.parts):
            if isinstance(part, _Codes):
                part = self._node("rescale", eqn, [part.tensor], {}, {}, (*step, iteration), value.shape[1:])
            if not isinstance(part, _Accumulator):
                raise stacked(found.eqn)
            label = self._fresh(_stepped(self._label(place, step), (iteration,)))
            output = self._tensor(label, value.shape[1:], place, step)
            self.nodes.append(Node(label, QUANTIZE, (part.tensor,), output, {}, {}, eqn.location))
            parts.append(self.tensors[output])
        return _Codes(self._concatenated(parts, eqn, step, self._fresh(self._label(place, step))))

    def _concatenated(
        self, parts: Sequence[Tensor], eqn: Equation, step: tuple[int, ...], name: str | None = None
    ) -> str:
        rows: list[str] = []
        for iteration, part in enumerate(parts):
            shape = (1, *part.shape)
            attributes = {"shape": list(shape)}
            label = self._fresh(_stepped(f"{eqn.scope}/row" if eqn.scope else "row", (*step, iteration)))
            rows.append(self._moved("reshape", part, shape, [part.name], attributes, eqn, step, label))
        shape = (len(parts), *parts[0].shape)
        return self._moved("concatenate", parts[0], shape, rows, {"axis": 0}, eqn, step, name)

    def _moved(
        self,
        op: str,
        like: Tensor,
        shape: Sequence[int | None],
        inputs: Sequence[str],
        attributes: dict[str, Any],
        eqn: Equation,
        step: tuple[int, ...],
        name: str | None = None,
    ) -> str:
        """A node that moves codes, or integers, of tensors like the given one."""
        name = name or self._fresh(_stepped(f"{eqn.scope}/{op}" if eqn.scope else op, step))
        self._add(Tensor(name, tuple(shape), like.dtype, like.quantization))
        self.nodes.append(Node(name, op, tuple(inputs), name, {}, attributes, eqn.location))
        return name

    # ------------------------------------------------------------------ tensors

    def _get(self, env: dict[Value, Any], value: Value) -> Any:
        found = _Constant(value.constant) if value.constant is not None else env[value]
        if isinstance(found, _Stack):
            raise stacked(found.eqn)
        return found

    def _own(self, place: Place, step: tuple[int, ...]) -> tuple[int, ...]:
        """The iterations that the quantizer of a place tells apart."""
        return place.own(step[: len(place.stack)])

    def _label(self, place: Place, step: tuple[int, ...]) -> str:
        return _stepped(place.label, step[: len(place.stack)])

    def _evaluate(self, eqn: Equation, found: list[Any]) -> list[Any]:
        """The equation on constants; what no iteration of a scan changes is computed once."""
        values = [f.value for f in found]
        key = (eqn, *map(id, values))
        if key not in self.evaluated:
            # the inputs stay alive, so that nothing else gets their identities
            self.evaluated[key] = values, self._computed(eqn, found)
        return self.evaluated[key][1]

    def _computed(self, eqn: Equation, found: list[Any]) -> list[Any]:
        if any(isinstance(f.value, jax.ShapeDtypeStruct) for f in found):
            return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eqn.outputs]
        if eqn.body is not None:
            return _run_constant(eqn, [f.value for f in found])
        return eqn.bind(*(jax.numpy.asarray(f.value) for f in found))

    def _kernel(self, eqn: Equation, index: int, value: Any, step: tuple[int, ...]) -> str:
        place = self.annotation.weights[eqn, index]
        step = step[: len(place.stack)]
        # no iteration of a scan changes a weight that lies outside of it
        if (eqn, index, step) not in self.kernels:
            name = self._fresh(_stepped(place.label, step))
            self._add(weight_tensor(name, place, value, self.params_of(place, place.own(step), value), eqn))
            self.kernels[eqn, index, step] = name
        return self.kernels[eqn, index, step]

    def _constant(self, name: str, value: Any) -> str:
        name = self._fresh(name)
        data = None if isinstance(value, jax.ShapeDtypeStruct) else value
        self._add(Tensor(name, tuple(np.shape(value)), str(value.dtype), None, data))
        return name

    def _integer_constant(self, name: str, value: Any) -> str:
        """Integers as int32, booleans as they are."""
        wanted = np.dtype(bool if value.dtype == np.bool_ else np.int32)
        if traced(value):
            # in the exact forward: the conversion with concrete numbers has looked at them
            value = value.astype(wanted)
        elif not isinstance(value, jax.ShapeDtypeStruct):
            value = np.asarray(value)
            if value.size and value.dtype != np.bool_ and (value.min() < -(2**31) or value.max() >= 2**31):
                raise ConversionError(f"{name}: expected integers within int32, got {value.min()} to {value.max()}.")
            value = value.astype(wanted)
        return self._constant(
            name, jax.ShapeDtypeStruct(value.shape, wanted) if isinstance(value, jax.ShapeDtypeStruct) else value
        )

    def _tensor(self, name: str, shape: tuple[int, ...], place: Place, step: tuple[int, ...]) -> str:
        # one object per quantizer: later passes see that two tensors stand on one grid, also inside a trace
        own = self._own(place, step)
        if (place.name, own) not in self.grids:
            params = self.params_of(place, own, None)
            spec = params.spec
            grid = Quantization(params.scale, params.integer_zero_point(), spec.qmin, spec.qmax)
            self.grids[place.name, own] = grid, str(spec.dtype)
        quantization, dtype = self.grids[place.name, own]
        self._add(Tensor(name, shape, dtype, quantization))
        return name

    def _node(
        self,
        op: str,
        eqn: Equation,
        inputs: Sequence[str],
        constants: dict[str, str],
        attributes: dict[str, Any],
        step: tuple[int, ...],
        shape: tuple[int, ...] | None = None,
    ) -> _Accumulator:
        name = self._fresh(f"{self._name(eqn, step)}/accumulator")
        self._add(Tensor(name, eqn.out_shapes[0] if shape is None else shape, "int32"))
        self.nodes.append(Node(name, op, tuple(inputs), name, constants, attributes, eqn.location))
        return _Accumulator(name, ())

    def _name(self, eqn: Equation, step: tuple[int, ...]) -> str:
        return _stepped(f"{eqn.scope}/{eqn.primitive}" if eqn.scope else eqn.primitive, step)

    def _unlabelled(self, name: str) -> str:
        """A name for a tensor without a quantizer of its own, which no quantizer's label is."""
        unique, count = self._fresh(name), 1
        while unique in self.labels:
            count += 1
            unique = self._fresh(f"{name}#{count}")
        return unique

    def _fresh(self, name: str) -> str:
        unique, count = name, self.counts.get(name, 1)
        while unique in self.tensors:
            count += 1
            unique = f"{name}#{count}"
        self.counts[name] = count
        return unique

    def _add(self, tensor: Tensor) -> None:
        self.tensors[tensor.name] = tensor


@dataclasses.dataclass(frozen=True)
class _Stack:
    """What a scan stacks from codes on several grids; a quantizer behind the scan brings them onto one."""

    eqn: Equation
    parts: tuple[Any, ...]


def _structure(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct) or traced(value)


def _run_constant(eqn: Equation, values: list[Any]) -> list[Array]:
    return eqn.bind(*(jax.numpy.asarray(v) for v in values))


def _stepped(name: str, step: tuple[int, ...]) -> str:
    return name + "".join(f"[{i}]" for i in step)
