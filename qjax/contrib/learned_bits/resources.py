"""EBOPs: the logic that a network's multiplications need, computed from the bits of every code.

"Effective bit operations" are the sum over all multiplications of one example of the product of both factors' bits (Sun
et al. 2024, HGQ, arXiv 2405.00645, section III.C). A weight counts the bits from its highest to its lowest set bit. Its
sign, its trailing zeros and a weight of 0 cost nothing, because a circuit for one known factor needs no logic for them.
An activation counts the bits of its quantizer without the sign. Zeros of a padding count like any other number.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.contrib.post_training.sums import place_behind
from qjax.model.call import Call
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.numerics.qspec import QSpec
from qjax.ops.facts import ProductFacts
from qjax.support.batches import arguments_of, batch_size
from qjax.tracing import Annotation, Equation, Program, Value
from qjax.training.weights import codes_of, unchanged


@dataclasses.dataclass(frozen=True)
class Multiplications:
    """The multiplications of one matrix product or convolution.

    Attributes:
      names: the quantizers of both factors.
      count: how many there are per example.
    """

    names: tuple[str, str]
    count: float


def multiplications(call: Call, batch: int) -> tuple[Multiplications, ...]:
    """The multiplications of a call with `batch` examples, one entry per product.

    Raises:
      ValueError: a product reads a tensor that has no quantizer.
    """
    walk = _Walk(call.annotation, {value: eqn for eqn in call.traced.program.walk() for value in eqn.outputs})
    return tuple(
        Multiplications(names, count / batch)
        for names, count in walk.products(call.traced.program, times=1, outside={})
    )


@dataclasses.dataclass(frozen=True)
class _Walk:
    """made: the equation that computes each value, including inside scans."""

    annotation: Annotation
    made: Mapping[Value, Equation]

    def products(
        self, program: Program, times: int, outside: Mapping[Value, Value]
    ) -> Iterator[tuple[tuple[str, str], float]]:
        """(quantizers, count) of each product. outside: an input of a body -> the value outside that it stands for."""
        for eqn in program.equations:
            if eqn.body is not None:
                length = int(eqn.params["length"]) if eqn.is_scan else 1
                yield from self.products(eqn.body, times * length, {**outside, **_inputs_of(eqn, eqn.body)})
            reading = self.annotation.ops.get(eqn)
            if reading is None or not isinstance(reading[0], ProductFacts):
                continue
            first, second = (self._name(eqn, index, outside) for index in (0, 1))
            shape = eqn.in_shapes[1]
            kept = math.prod(shape[axis] for axis in reading[0].weight_axes(eqn, 1))
            terms = math.prod(shape) / max(1, kept)
            yield (first, second), times * math.prod(eqn.out_shapes[0]) * terms

    def _name(self, eqn: Equation, index: int, outside: Mapping[Value, Value]) -> str:
        value, place = eqn.inputs[index], self.annotation.weights.get((eqn, index))
        seen: set[Value] = set()
        while place is None and value not in seen:
            place = place_behind(self.annotation, self.made, value)
            seen.add(value)
            value = outside.get(value, value)
        if place is None:
            raise ValueError(
                f"The product at {eqn.where} reads a tensor without a quantizer, so its bits are unknown. Quantize "
                "the whole model: leave out qjax.FLOAT and qjax.Dynamic."
            )
        return place.name


def _inputs_of(eqn: Equation, body: Program) -> dict[Value, Value]:
    """An input of a body -> its value outside; for the carry of a scan, the value that the body computes."""
    found = dict(zip(body.inputs, eqn.inputs, strict=True))
    if eqn.is_scan:
        first = int(eqn.params["num_consts"])
        carried = int(eqn.params["num_carry"])
        found |= dict(zip(body.inputs[first : first + carried], body.outputs, strict=False))
    return found


def magnitude_bits(spec: QSpec) -> int:
    """The bits of an activation's code without its sign."""
    return spec.bits - int(spec.signed)


def widths_of_codes(codes: Any) -> np.ndarray:
    """The distance from the highest to the lowest set bit of each magnitude; 0 for a 0. int64, on the host."""
    magnitude = np.abs(np.asarray(codes, np.int64))
    lowest = magnitude & -magnitude
    return np.where(magnitude == 0, 0, np.log2(np.maximum(magnitude, 1) / np.maximum(lowest, 1)).astype(np.int64) + 1)


def total(products: tuple[Multiplications, ...], widths: Mapping[str, jax.Array]) -> jax.Array:
    """float32 EBOPs. widths: name of a quantizer -> the bits of each of its weights; one number for an activation."""
    parts = [
        np.float32(product.count) * jnp.mean(widths[product.names[0]]) * jnp.mean(widths[product.names[1]])
        for product in products
    ]
    return sum(parts, jnp.zeros((), jnp.float32))


def ebops(qmodel: QuantizedModel, sample: Any) -> float:
    """The effective bit operations of one example, as the module `qjax.contrib.learned_bits.resources` defines them.

    A weight that the model computes from a parameter, or that is in a scan, counts with all bits of its quantizer.

    Args:
      qmodel: the quantized model.
      sample: one batch, an array or a tuple of the call's arguments; its first axis is the batch.

    Raises:
      ValueError: a product reads a tensor without a quantizer.

    Examples:
      ```python
      print(qjax.training.ebops(qmodel, x))
      ```
    """
    check_quantized(qmodel, "ebops")
    args = arguments_of(sample, "ebops")
    call = evaluation_copy(qmodel).trace(*args)
    products = multiplications(call, batch_size(args))
    known = codes_of(qmodel, unchanged(call, qmodel.plan, repeated=True).names)
    widths: dict[str, float] = {name: magnitude_bits(q.spec) for name, q in qmodel.plan.quantizers}
    widths |= {name: float(np.mean(widths_of_codes(codes))) for name, codes in known.items()}
    return float(sum(p.count * widths[p.names[0]] * widths[p.names[1]] for p in products))
