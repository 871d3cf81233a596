"""Finds pairs of layers between which a scale can move: the producer of a tensor, and its readers, channel by channel.

Dividing channel c of a tensor by s_c and multiplying whatever reads it there by s_c changes no result. Pairs are found
in the annotated program, whatever the layers are called:

- made: the parameters that scale each channel of the tensor separately. These are the scale and bias of a norm or batch
  norm, or the kernel and bias of a dense layer or convolution. Only operations that commute with a positive factor may
  lie between them and the tensor: relu, leaky relu, reshapes of other axes, casts.
- read: dense layers and convolutions only, each with a kernel that is a parameter of the model. A depthwise convolution
  has separate filters for each channel.

A tensor that a residual addition also reads belongs to no pair. A clip at 6 (relu6) commutes with a factor only below
6. Such a pair is `capped`: a channel may grow only as long as the calibration data stay below the clip.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from qjax.contrib.post_training.products import Product, find_products
from qjax.model.call import Call
from qjax.ops.conv import Conv
from qjax.ops.dot import Dot
from qjax.tracing import Equation, Value

_KEEPS = frozenset({"relu", "leaky_relu", "identity", "convert_element_type", "copy", "dropout"})
"""Functions with f(s x) = s f(x) for s > 0, channel by channel."""


@dataclasses.dataclass(frozen=True)
class Made:
    """A parameter whose numbers along `axis` are multiplied by 1 / s."""

    path: str
    axis: int


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """name: of the first reader's weight. quantizer: of the tensor between, or None. channels: how many.

    made: the parameters that produce the tensor. read: the layers that read it. norm: whether a norm produces it.
    capped: the bound of a clip between, or None.
    """

    name: str
    quantizer: str | None
    channels: int
    made: tuple[Made, ...]
    read: tuple[Product, ...]
    norm: bool
    capped: float | None


def input_axis(product: Product) -> tuple[int, int] | None:
    """(axis of the data, axis of the weight) of a layer's input channels; None unless there is exactly one."""
    eqn, weight = product.equation, product.weight
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive == "dot_general":
        contracting, batch = numbers
        if len(contracting[0]) != 1 or batch[0]:
            return None
        return int(contracting[1 - weight][0]), int(contracting[weight][0])
    groups, shape = eqn.params["feature_group_count"], eqn.in_shapes
    if groups == 1:
        return int(numbers.lhs_spec[1]), int(numbers.rhs_spec[1])
    channels = shape[0][numbers.lhs_spec[1]]
    # With one channel per group, the filters lie along the output axis.
    return (int(numbers.lhs_spec[1]), int(numbers.rhs_spec[0])) if groups == channels else None


def find_pairs(call: Call, names: tuple[str, ...]) -> tuple[list[Pair], dict[str, str]]:
    """The pairs in the order of execution, and for other layers: name of the weight -> why its input is in no pair.

    names: the weights that are unchanged parameters.
    """
    items, left = find_products(call, names)
    program = call.traced.program
    finder = _Finder(call, items)
    groups: dict[Value, list[Product]] = {}
    for product in items:
        groups.setdefault(product.equation.inputs[1 - product.weight], []).append(product)
    found: list[Pair] = []
    for value, products in groups.items():
        pair = finder.pair(value, products) if value not in program.outputs else "the model returns its input"
        if isinstance(pair, str):
            left.update({product.name: pair for product in products})
        else:
            found.append(pair)
    return found, left


class _Finder:
    def __init__(self, call: Call, items: Sequence[Product]) -> None:
        traced, self._annotation = call.traced, call.annotation
        self._made = {value: eqn for eqn in traced.program.equations for value in eqn.outputs}
        self._readers: dict[Value, list[Equation]] = {}
        for eqn in traced.program.equations:
            for value in eqn.inputs:
                self._readers.setdefault(value, []).append(eqn)
        own = zip(traced.program.inputs, traced.names, traced.constant, strict=True)
        self._path: Mapping[Value, str] = {value: name for value, name, is_state in own if is_state}
        self._uses = Counter(value for eqn in traced.program.walk() for value in eqn.inputs)
        self._product = {product.equation: product for product in items}
        self._outputs = set(traced.program.outputs)

    def pair(self, value: Value, products: Sequence[Product]) -> Pair | str:
        """The pair that can move a scale over a tensor, or why none can."""
        axes = [input_axis(product) for product in products]
        if len(self._readers[value]) != len(products):
            return "other operations read its input, such as a residual addition"
        if any(axis is None for axis in axes) or len({axis[0] for axis in axes if axis}) != 1:
            return "its input channels are not one axis"
        (axis,) = {axis[0] for axis in axes if axis}
        self._batch_norm = False
        found = self._upstream(value, axis, None)
        if isinstance(found, str):
            return found
        made, capped = found
        place = self._annotation.values.get(value)
        norm = made[0].path not in {product.name for product in self._product.values()} and not self._batch_norm
        quantizer = None if place is None else place.name
        return Pair(products[0].name, quantizer, value.shape[axis], made, tuple(products), norm, capped)

    def _upstream(self, value: Value, axis: int, capped: float | None) -> tuple[tuple[Made, ...], float | None] | str:
        """The parameters that scale `axis` of a tensor."""
        eqn = self._made.get(value)
        if eqn is None:
            return "its input is the model's"
        data = eqn.inputs[0]
        if eqn.primitive in _KEEPS and data.shape == value.shape:
            return self._on(data, axis, capped)
        if eqn.primitive in ("relu6", "clamp", "min"):
            bound = self._cap(eqn)
            if bound is None:
                return f"{eqn.primitive!r} before it does not preserve a factor"
            data = next(v for v in eqn.inputs if v.shape == value.shape and v.constant is None)
            return self._on(data, axis, bound if capped is None else min(bound, capped))
        if eqn.primitive == "max" and any(v.constant is not None and np.all(v.constant == 0) for v in eqn.inputs):
            data = next(v for v in eqn.inputs if v.constant is None)
            return self._on(data, axis, capped)
        if eqn.primitive in ("layer_norm", "rms_norm", "group_norm", "batch_norm"):
            return self._norm(eqn, axis, capped)
        if eqn.primitive == "add":
            return self._biased(eqn, axis, capped)
        if eqn in self._product:
            return self._weight(eqn, axis, (), capped)
        return f"{eqn.primitive!r} before it does not preserve a factor"

    def _on(self, value: Value, axis: int, capped: float | None) -> tuple[tuple[Made, ...], float | None] | str:
        if len(self._readers.get(value, ())) != 1 or value in self._outputs:
            return "other operations read the result of the layer before it"
        return self._upstream(value, axis, capped)

    def _cap(self, eqn: Equation) -> float | None:
        if eqn.primitive == "relu6":
            return 6.0
        constants = [v.constant for v in eqn.inputs if v.constant is not None]
        if eqn.primitive == "clamp":
            low, high = eqn.inputs[0].constant, eqn.inputs[2].constant
            if low is None or high is None or not np.all(low == 0) or np.size(high) != 1:
                return None
            return float(np.reshape(high, ()))
        if len(constants) == 1 and np.size(constants[0]) == 1 and float(np.reshape(constants[0], ())) > 0:
            return float(np.reshape(constants[0], ()))
        return None

    def _norm(self, eqn: Equation, axis: int, capped: float | None) -> tuple[tuple[Made, ...], float | None] | str:
        layer = eqn.params.get("layer")
        if layer is None:
            return f"{eqn.primitive!r} before it has no parameters of its own"
        self._batch_norm = eqn.primitive == "batch_norm"
        operands = layer.operands
        attributes = dict(layer.attributes)
        rank = len(eqn.out_shapes[0])
        own = rank - 1 - attributes["trailing"] if eqn.primitive == "batch_norm" else attributes["feature_axes"]
        if own not in (axis, (axis,)):
            return "the norm before it scales other axes"
        if "scale" not in operands:
            return "the norm before it has no scale"
        made: list[Made] = []
        for name in ("scale", "bias"):
            if name in operands:
                value = eqn.inputs[operands.index(name)]
                if value not in self._path or self._uses[value] != 1 or len(value.shape) != 1:
                    return f"the {name} of the norm before it is not its own parameter"
                made.append(Made(self._path[value], 0))
        return tuple(made), capped

    def _biased(self, eqn: Equation, axis: int, capped: float | None) -> tuple[tuple[Made, ...], float | None] | str:
        for data, bias in (eqn.inputs, eqn.inputs[::-1]):
            product = self._product.get(self._made.get(data))  # pyright: ignore[reportArgumentType]
            if product is None or len(self._readers.get(data, ())) != 1 or product.shift is None or not product.adds:
                continue
            root = bias
            while root in self._made:
                root = self._made[root].inputs[0]
            if self._path.get(root) == product.shift and self._uses[root] == 1:
                return self._weight(product.equation, axis, (Made(product.shift, 0),), capped)
        return "'add' before it is not the bias of a layer"

    def _weight(
        self, eqn: Equation, axis: int, bias: tuple[Made, ...], capped: float | None
    ) -> tuple[tuple[Made, ...], float | None] | str:
        product = self._product[eqn]
        op = self._annotation.ops[eqn][0]
        if not isinstance(op, (Conv, Dot)) or axis not in dict(product.channels):
            return "the layer before it has other channels"
        return (Made(product.name, dict(product.channels)[axis]), *bias), capped
