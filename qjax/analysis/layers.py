"""Lists the layers of a quantized model: their weights, the tensors around them, and their multiplications.

A layer is whatever owns a weight with a quantizer. Its quantizers are those of the weight, of the tensors that it
reads, and of the tensor after its chain (bias, batch norm, relu). One activation may therefore belong to several
layers: to the one that produces it and to those that read it.
"""

import dataclasses
import math
from typing import Any

from qjax.model.quantized_model import QuantizedModel
from qjax.ops import Role
from qjax.support.batches import batch_size
from qjax.tracing import Annotation, Place, Program

FLOAT_BITS = 32
"""The number of bits of a tensor without a quantizer in products of bits."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight and its uses.

    name: the module's path, or the weight's where a module has several. module: the path. weight: its quantizer.
    inputs, outputs: the quantizers of its inputs and outputs; several where the weight is used more than once.
    parameters: numbers in the weight. macs: multiplications per example, over all uses.
    """

    name: str
    module: str
    op: str
    weight: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: int
    macs: int

    @property
    def quantizers(self) -> frozenset[str]:
        """All quantizers of the layer."""
        return frozenset((self.weight, *self.inputs, *self.outputs))


def layers_of(qmodel: QuantizedModel, args: tuple[Any, ...]) -> tuple[Layer, ...]:
    """The layers in the order of execution; `args`: of one call, whose first array's first axis is the batch."""
    call = qmodel.trace(*args)
    return read_layers(call.traced.program, call.annotation, batch_size(args))


def read_layers(program: Program, annotation: Annotation, batch: int) -> tuple[Layer, ...]:
    """The layers of an annotated program."""
    weights: dict[str, Place] = {}
    inputs: dict[str, dict[str, None]] = {}
    outputs: dict[str, dict[str, None]] = {}
    for use in annotation.layers:
        name = use.weight.name
        weights.setdefault(name, use.weight)
        for place, found in ((use.input, inputs), (use.output, outputs)):
            found.setdefault(name, {}).update({} if place is None else {place.name: None})
    totals = _macs(program, annotation)
    modules = [place.module for place in weights.values()]
    return tuple(
        Layer(
            name=place.module if place.module and modules.count(place.module) == 1 else name,
            module=place.module,
            op=place.op,
            weight=name,
            inputs=tuple(inputs[name]),
            outputs=tuple(outputs[name]),
            parameters=math.prod(place.shape) * math.prod(place.own(place.stack)),
            macs=totals.get(name, 0) // max(1, batch),
        )
        for name, place in weights.items()
    )


def _macs(program: Program, annotation: Annotation, times: int = 1) -> dict[str, int]:
    """Weight -> multiplications of one call.

    Each output is a sum over the weight's axes that the output lacks, so the count is outputs times weights per output.
    Zeros of a padding, or between the inputs of a transposed convolution, count like any other operand. An embedding
    counts none.
    """
    totals: dict[str, int] = {}
    for eqn in program.equations:
        if eqn.body is not None:
            length = int(eqn.params["length"]) if eqn.is_scan else 1
            for name, count in _macs(eqn.body, annotation, times * length).items():
                totals[name] = totals.get(name, 0) + count
        reading = annotation.ops.get(eqn)
        if reading is None or reading[0].role is not Role.PRODUCER:
            continue
        for index, shape in enumerate(eqn.in_shapes):
            place = annotation.weights.get((eqn, index))
            if place is not None and place.kind == "weight":
                kept = math.prod(shape[axis] for axis in reading[0].weight_axes(eqn, index))
                count = times * math.prod(eqn.out_shapes[0]) * (math.prod(shape) // max(1, kept))
                totals[place.name] = totals.get(place.name, 0) + count
    return totals
