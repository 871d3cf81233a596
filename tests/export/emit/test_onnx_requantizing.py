"""The short forms of a requantization: the rule's codes for every accumulator, in few operators."""

import numpy as np
import onnx
import pytest
from flax import nnx

import qjax
from qjax.export.emit.onnx import products, to_model
from qjax.export.emit.requantizations import Product, line_of
from qjax.export.emit.requantize_as_shift import Line
from qjax.numerics import get_rule, requantize
from tests.layers.round_trip import data

CHANNELS = 5
MOST_OF_FLOATS = 8 + 2 * 16 + 1


def product_of(rule: str, scale: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> Product:
    attributes = {"rule": rule, "qmin": -128, "qmax": 127, "dtype": "int8", "channels": [[1, 1]], "rank": 2}
    constants = get_rule(rule).prepare(scale)._asdict()
    values = {"kernel": kernel, "bias": bias, "y_zero_point": np.asarray(-3, np.int32), **constants}
    return Product(attributes, values, -100, 155)


def codes_of(line: Line, acc: np.ndarray) -> np.ndarray:
    """What the operators compute, in Python's integers."""
    found = np.empty(acc.shape, object)
    for channel in range(acc.shape[1]):
        raised = set() if line.raised is None else set(line.raised[:, channel].tolist())
        for row, number in enumerate(acc[:, channel].tolist()):
            offset = line.offset[channel]
            if line.kink is not None and line.below is not None and number < line.kink[channel]:
                offset = line.below[channel]
            quotient = (int(line.factor[channel]) * (number + (number in raised)) + int(offset)) >> line.shift
            found[row, channel] = min(max(quotient, line.lowest), line.highest)
    return found.astype(np.int64)


@pytest.mark.parametrize(
    ("rule", "sides"), [("single_round", 1), ("double_round", 2), ("float32", 1), ("float64_away", 1)]
)
def test_a_line_is_the_rule_on_every_accumulator(rule, sides):
    rng = np.random.default_rng(0)
    kernel = rng.integers(-127, 128, (20, CHANNELS)).astype(np.int8)
    bias = rng.integers(-3000, 3000, CHANNELS).astype(np.int32)
    product = product_of(rule, rng.uniform(2**-10, 2**-8, CHANNELS).astype(np.float32), kernel, bias)
    found = line_of(product)
    assert found is not None
    line, shape = found
    assert shape == (CHANNELS,)
    assert (line.below is None) == (sides == 1)
    positive, negative = (part.astype(np.int64).sum(0) for part in (kernel.clip(min=0), kernel.clip(max=0)))
    low, high = positive * -100 + negative * 155, positive * 155 + negative * -100
    # every seventh accumulator, both ends, and all around the first and the last codes
    acc = np.linspace(low, high, 6000, dtype=np.int64)
    constants = get_rule(rule).constants(**{role: product.values[role] for role in get_rule(rule).fields})
    want = requantize((acc + bias).astype(np.int32), constants, rule=rule, zero_point=-3)
    assert np.array_equal(codes_of(line, acc), np.asarray(want))


def test_rules_without_a_line_have_none():
    kernel, bias = np.full((8, CHANNELS), 100, np.int8), np.zeros(CHANNELS, np.int32)
    # half of all ties go down
    assert line_of(product_of("nearest_even", np.full(CHANNELS, 2.0**-9, np.float32), kernel, bias)) is None
    # the place decides the rounding
    scale = np.full(CHANNELS, 0.0017, np.float32)
    assert line_of(product_of("tflite_depthwise_neon", scale, kernel, bias)) is None
    # a result beyond int32
    assert line_of(product_of("float32_x86", np.full(CHANNELS, 2.0**14, np.float32), kernel, bias)) is None


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv, self.head = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).max((1, 2)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "most"), [("tflite_micro", 10), ("onnxruntime", MOST_OF_FLOATS)])
def test_how_many_operators_a_layer_has(target, most):
    """Before, the rounding alone was 37 to 44 operators, and 92 to 96 of the rule in float32."""
    x = data(4, 6, 6, 3)
    qmodel = qjax.quantize(Net(), qjax.Recipe(target=target), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    model = to_model(qjax.convert(qmodel, x).ir, style="integer")
    counts = {f.name: sum(node.op_type != "Constant" for node in f.node) for f in model.functions}
    requantize_, layers = (
        [count for name, count in counts.items() if name.startswith(kind)] for kind in ("requantize", ("conv", "dot"))
    )
    assert len(requantize_) == 2
    assert max(requantize_) <= most
    # two for the activations, two for the weights, the product, and the call of the requantization
    assert layers == [6, 6]
    inside = {node.op_type for f in model.functions if f.name.startswith("requantize") for node in f.node}
    assert not {"Div", "BitwiseXor", "Mod", "Abs", "Sign"} & inside
    kinds = {initializer.data_type for initializer in model.graph.initializer}
    assert onnx.TensorProto.FLOAT not in kinds


def test_pairs_of_products_that_cannot_saturate():
    assert products.never_saturates(np.array([[64], [64], [-64], [-64]]), [0], 255)
    assert not products.never_saturates(np.array([[65], [0], [64]]), [0], 255)
    assert not products.never_saturates(np.array([[-65], [0], [-64]]), [0], 255)
    assert products.never_saturates(np.array([[127, 1], [-128, 127]]), [0], 255)
    assert products.never_saturates(np.full((9, 2), -128), [0], 127)
