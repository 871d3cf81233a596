"""ONNX's operators on codes, as data: the float operator of each, and the roles of its inputs.

The reader decomposes them by this table (DequantizeLinear, the float operator, QuantizeLinear), and an emitter combines
them by it. Sources: the specification of ONNX (QLinearConv, QLinearMatMul, MatMulInteger, ConvInteger) and ONNX
Runtime's docs/ContribOperators.md (domain com.microsoft).
"""

import dataclasses
from collections.abc import Mapping

MICROSOFT = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class OnCodes:
    """One operator on codes.

    Attributes:
      name, domain: of the operator.
      real: the float operator that it computes (of ONNX's own domain), between two changes of the grid.
      operands: the roles of the tensors that are data, in the order of the float operator's inputs.
      roles: of its inputs, in order. Role r of a tensor is followed by "r_scale" and "r_zero_point"; y's two belong to
        the output; "bias" is int32 on the accumulator's grid.
      variadic: whether y's two come first, and then any number of operands with theirs (QLinearConcat).
      attributes: those that it has in addition to the float operator's.
    """

    name: str
    domain: str
    real: str
    operands: tuple[str, ...]
    roles: tuple[str, ...]
    variadic: bool = False
    attributes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def has_bias(self) -> bool:
        """Whether there may be a bias."""
        return "bias" in self.roles


def _grid(name: str) -> tuple[str, str]:
    return f"{name}_scale", f"{name}_zero_point"


def _tensor(name: str) -> tuple[str, str, str]:
    return name, *_grid(name)


_Y = _grid("y")


def _unary(name: str, real: str, **attributes: int) -> OnCodes:
    return OnCodes(name, MICROSOFT, real, ("x",), (*_tensor("x"), *_Y), attributes=attributes)


def _binary(name: str, real: str) -> OnCodes:
    return OnCodes(name, MICROSOFT, real, ("a", "b"), (*_tensor("a"), *_tensor("b"), *_Y))


_ALL = (
    OnCodes("QLinearConv", "", "Conv", ("x", "w"), (*_tensor("x"), *_tensor("w"), *_Y, "bias")),
    OnCodes("QLinearMatMul", "", "MatMul", ("a", "b"), (*_tensor("a"), *_tensor("b"), *_Y)),
    OnCodes("QGemm", MICROSOFT, "Gemm", ("a", "b"), (*_tensor("a"), *_tensor("b"), "bias", *_Y)),
    _binary("QLinearAdd", "Add"),
    _binary("QLinearMul", "Mul"),
    _unary("QLinearAveragePool", "AveragePool"),
    _unary("QLinearGlobalAveragePool", "GlobalAveragePool"),
    _unary("QLinearSigmoid", "Sigmoid"),
    _unary("QLinearLeakyRelu", "LeakyRelu"),
    _unary("QLinearSoftmax", "Softmax", opset=13),
    OnCodes("QLinearConcat", MICROSOFT, "Concat", (), _Y, variadic=True),
)

ON_CODES = {(op.domain, op.name): op for op in _ALL}
"""Every operator on codes that has a form in the graph, by (domain, name)."""

OF_REAL = {op.real: op for op in _ALL}
"""The same by the float operator."""

METADATA = "qjax"
"""The key of qjax's own JSON among a model's metadata_props; see `qjax.contrib.importers.onnx.hints`."""
