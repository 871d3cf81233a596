"""Builds a graph: collects its tensors and nodes under unique names."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qjax.graph.ir import Node, Quantization, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.lower.values import Accumulator, Step
from qjax.lower.weights import weight_tensor
from qjax.numerics._namespace import traced
from qjax.numerics.affine import QParams
from qjax.ops.quantize import Quantize
from qjax.support.names import Names
from qjax.tracing import Annotation, Equation, Place

ParamsOf = Callable[[Place, tuple[int, ...], Any], QParams]
"""(place, indices of the scan iterations, the tensor if it is a constant) -> parameters."""


class Builder:
    """Tensors and nodes in the order of their creation. inputs: the tensors that are fed."""

    def __init__(self, annotation: Annotation, params_of: ParamsOf) -> None:
        self.annotation = annotation
        self.params_of = params_of
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.inputs: list[str] = []
        self.floats: dict[Any, str] = {}
        """The float tensors of results that several products read."""
        places = list(annotation.values.values())
        self._labels = {place.label for place in places}
        self._labels_of_steps = {place.label for place in places if place.stack}
        self._names = Names(between="#", beside=self.tensors)
        self._grids: dict[tuple[str, tuple[int, ...]], tuple[Quantization, str]] = {}
        self._kernels: dict[tuple[Equation, int, Step], str] = {}

    # ------------------------------------------------------------------ names

    def name(self, eqn: Equation, step: Step) -> str:
        """The name from which the tensors of an equation get theirs."""
        return stepped(f"{eqn.scope}/{eqn.primitive}" if eqn.scope else eqn.primitive, step)

    def label(self, place: Place, step: Step) -> str:
        """The name of the tensor of a place in one iteration."""
        return stepped(place.label, step[: len(place.stack)])

    def fresh(self, name: str) -> str:
        """The name, with a number appended if a tensor has it already."""
        return self._names.free(name)

    def unlabelled(self, name: str) -> str:
        """A name for a tensor without its own quantizer, distinct from every quantizer's label."""
        unique, count = self.fresh(name), 1
        while unique in self._labels or _STEPS.sub("", unique) in self._labels_of_steps:
            count += 1
            unique = self.fresh(f"{name}#{count}")
        return unique

    # ------------------------------------------------------------------ tensors

    def add(self, tensor: Tensor) -> None:
        """Add a tensor under its own name."""
        self.tensors[tensor.name] = tensor

    def own(self, place: Place, step: Step) -> tuple[int, ...]:
        """The iterations for which a place has separate quantizers."""
        return place.own(step[: len(place.stack)])

    def on_grid(self, name: str, shape: tuple[int, ...], place: Place, step: Step) -> str:
        """Add a tensor of codes with the quantization parameters of a place."""
        # Use one object per quantizer, because passes compare identities: inside a trace they cannot compare values.
        own = self.own(place, step)
        if (place.name, own) not in self._grids:
            params = self.params_of(place, own, None)
            spec = params.spec
            grid = Quantization(params.scale, params.integer_zero_point(), spec.qmin, spec.qmax)
            self._grids[place.name, own] = grid, str(spec.dtype)
        quantization, dtype = self._grids[place.name, own]
        self.add(Tensor(name, shape, dtype, quantization))
        return name

    def kernel(self, eqn: Equation, index: int, value: Any, step: Step) -> str:
        """The codes of a constant that an equation reads as codes: a weight, or an operand combined with codes."""
        place = self.annotation.weights[eqn, index]
        step = step[: len(place.stack)]
        # A weight from outside a scan is the same in every iteration.
        if (eqn, index, step) not in self._kernels:
            name = self.fresh(stepped(place.label, step))
            self.add(weight_tensor(name, place, value, self.params_of(place, place.own(step), value), eqn))
            self._kernels[eqn, index, step] = name
        return self._kernels[eqn, index, step]

    def constant(self, name: str, value: Any) -> str:
        """Add a constant unchanged."""
        name = self.fresh(name)
        data = None if isinstance(value, jax.ShapeDtypeStruct) else value
        self.add(Tensor(name, tuple(np.shape(value)), str(value.dtype), None, data))
        return name

    def integer_constant(self, name: str, value: Any) -> str:
        """Add integers as int32, or booleans unchanged."""
        wanted = np.dtype(bool if value.dtype == np.bool_ else np.int32)
        if traced(value):
            # Only the exact forward gets here, after the conversion with concrete numbers has checked the range.
            value = value.astype(wanted)
        elif not isinstance(value, jax.ShapeDtypeStruct):
            value = np.asarray(value)
            if value.size and value.dtype != np.bool_ and (value.min() < -(2**31) or value.max() >= 2**31):
                raise ConversionError(f"{name}: expected integers within int32, got {value.min()} to {value.max()}.")
            value = value.astype(wanted)
        return self.constant(
            name, jax.ShapeDtypeStruct(value.shape, wanted) if isinstance(value, jax.ShapeDtypeStruct) else value
        )

    # ------------------------------------------------------------------ nodes

    def accumulator(
        self,
        op: str,
        eqn: Equation,
        inputs: Sequence[str],
        constants: dict[str, str],
        attributes: dict[str, Any],
        step: Step,
        shape: tuple[int, ...] | None = None,
    ) -> Accumulator:
        """Add a node that computes an accumulator; shape: if it is not that of the equation's output."""
        name = self.fresh(f"{self.name(eqn, step)}/accumulator")
        self.add(Tensor(name, eqn.out_shapes[0] if shape is None else shape, "int32"))
        self.nodes.append(Node(name, op, tuple(inputs), name, constants, attributes, eqn.location))
        return Accumulator(name, ())

    def quantize(
        self, label: str, accumulator: str, shape: tuple[int, ...], place: Place, eqn: Equation, step: Step
    ) -> str:
        """Add a node that puts an accumulator on the grid of a place."""
        output = self.on_grid(label, shape, place, step)
        self.nodes.append(Node(label, Quantize.name, (accumulator,), output, {}, {}, eqn.location))
        return output


_STEPS = re.compile(r"(\[\d+\])+$")
"""The suffix that `stepped` appends."""


def stepped(name: str, step: Step) -> str:
    """The name in one iteration of the scans."""
    return name + "".join(f"[{i}]" for i in step)
