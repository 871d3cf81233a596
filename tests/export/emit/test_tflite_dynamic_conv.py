"""Convolutions of `qjax.Dynamic` in .tflite files: the graph and LiteRT with XNNPACK have equal floats."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, QSpec, Recipe, targets
from qjax.assign import assign
from qjax.contrib.importers.tflite import read
from qjax.export.emit.tflite import to_bytes
from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.file import File, Scales
from qjax.export.tflite_schema.layouts import same_padding
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.run.interpreter import Interpreter
from tests.export.emit.dynamic_graphs import KINDS, rows
from tests.export.emit.tflite_runtimes import litert
from tests.layers.dynamic_models import ASYMMETRIC, F32

WINDOWS: dict[str, dict[str, Any]] = {
    "3 x 3, same": {"window": (3, 3), "same": True},
    "3 x 3, strides": {"window": (3, 3), "strides": (2, 1), "same": True},
    "2 x 3, dilated": {"window": (2, 3), "dilation": (2, 1)},
    "5 x 5, one channel in": {"window": (5, 5), "channels": 1, "same": True},
    "1 x 3, one channel out": {"window": (1, 3), "features": 1},
    "padded on one side": {"window": (3, 3), "padding": [[2, 0], [0, 1]], "strides": (2, 2)},
    "a pixel": {"window": (1, 1)},
    "a pixel, dilated": {"window": (1, 1), "dilation": (2, 2)},
    "a pixel with strides": {"window": (1, 1), "strides": (2, 2)},
    "as large as the image": {"window": (9, 7)},
}


def convolution(
    window: tuple[int, int],
    *,
    channels: int = 6,
    features: int = 10,
    strides: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    same: bool = False,
    padding: Any = ((0, 0), (0, 0)),
    target: str = "tflite_xnnpack",
    per_channel: bool = True,
) -> Graph:
    """A `dynamic_conv` with random weights on images of 9 x 7."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (features, *window, channels)).astype(np.int8)
    scale = (rng.random((features,) if per_channel else ()) * 0.02 + 0.001).astype(F32)
    grid = Quantization(scale, np.zeros((), np.int32), -128, 127, (0,) if per_channel else ())
    if same:
        steps = zip((9, 7), window, strides, dilation, strict=True)
        padding = [list(same_padding(*each)) for each in steps]
    sizes = [
        (size + sum(pad) - (n - 1) * d - 1) // s + 1
        for size, pad, n, d, s in zip((9, 7), padding, window, dilation, strides, strict=True)
    ]
    tensors = {
        "x": Tensor("x", (None, 9, 7, channels), "float32"),
        "kernel": Tensor("kernel", codes.shape, "int8", grid, codes),
        "y": Tensor("y", (None, *sizes, features), "float32"),
    }
    attributes = {
        "symmetric": False,
        "strides": list(strides),
        "padding": [list(pair) for pair in padding],
        "rhs_dilation": list(dilation),
    }
    node = Node("y", "dynamic_conv", ("x",), "y", {"kernel": "kernel"}, attributes)
    return assign(Graph(tensors, (node,), ("x",), ("y",), ""), targets.get(target))


def images(kind: str, channels: int, count: int = 5) -> np.ndarray:
    """Images whose pixels, and which themselves, are of very different size; the first is zero."""
    if kind == "normal":
        return rows("normal", count, 63 * channels).reshape(count, 9, 7, channels)
    found = rows(kind, count * 63, channels).reshape(count, 9, 7, channels)
    found[0] = 0
    return found


@pytest.mark.parametrize("settings", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.sampled(2)
def test_convolutions_have_the_floats_of_the_runtime(settings: dict[str, Any]) -> None:
    for per_channel in (True, False):
        graph = convolution(**settings, per_channel=per_channel)
        data, run = to_bytes(graph, batch=5), Interpreter(graph)
        for kind in KINDS:
            x = images(kind, settings.get("channels", 6))
            (found,) = litert(data, "xnnpack", [x], every=False).values()
            np.testing.assert_array_equal(np.asarray(run(x)[0]), found)
        assert np.array_equal(Interpreter(read(data))(x)[0], found)


class Network(nnx.Module):
    """Padding that TFLite has no name for, a window of one pixel, dilation, and a dense layer on every pixel."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(3, 8, (3, 3), padding="SAME", rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, padding=((1, 1), (1, 1)), rngs=rngs)
        self.pixels = nnx.Conv(16, 12, (1, 1), rngs=rngs)
        self.third = nnx.Conv(12, 8, (2, 3), kernel_dilation=2, padding="VALID", rngs=rngs)
        self.dense = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second, self.pixels, self.third):
            x = nnx.relu(layer(x))
        return self.dense(x)


@pytest.mark.exhaustive
def test_a_model() -> None:
    examples = Dynamic(activations=ASYMMETRIC, per="example")
    pixels = Dynamic(activations=ASYMMETRIC, per="row")
    overrides: dict[str | type, Any] = {"first|second|third": examples, "pixels|dense": pixels}
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(6, 12, 11, 3)) * np.exp(2 * rng.normal(size=(6, 1, 1, 1)))).astype(F32)
    qmodel = qjax.quantize(Network(), Recipe(target="tflite_xnnpack", overrides=overrides), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    assert sum(node.op == "dynamic_conv" for node in graph.ir.nodes) == 4
    expected = np.asarray(graph(x))
    data = to_bytes(graph.ir, batch=len(x))
    (found,) = litert(data, "xnnpack", [x], every=False).values()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(qjax.exact(qmodel, x)(qmodel, x), expected)
    np.testing.assert_array_equal(graph(x[:2]), expected[:2])
    assert np.array_equal(Interpreter(read(data))(x)[0], expected)


def of_another_tool() -> bytes:
    """Biases and activations in the operator, as converters write them."""
    rng, file = np.random.default_rng(0), File()
    x = index = file.tensor("x", (5, 9, 7, 4), "float32")
    shape = (5, 9, 7, 4)
    for place, (window, features, activation) in enumerate((((3, 3), 16, "RELU"), ((1, 1), 8, "RELU6"))):
        codes = rng.integers(-127, 128, (features, *window, shape[3])).astype(np.int8)
        scale = Scales((rng.random(features) * 0.02 + 0.001).astype(F32))
        kernel = file.tensor(f"{place}/w", codes.shape, "int8", scale, codes)
        bias = file.tensor(f"{place}/b", (features,), "float32", data=rng.normal(size=features).astype(F32))
        shape = (*shape[:3], features)
        y = file.tensor(f"{place}/y", shape, "float32")
        options = {"padding": "SAME", "strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
        file.operator("CONV_2D", [index, kernel, bias], [y], fusedActivationFunction=activation, **options)
        index = y
    return bytes(file.to_bytes([x], [index]))


def test_a_file_of_another_tool() -> None:
    data, x = of_another_tool(), images("normal", 4)
    graph = read(data, target="tflite_xnnpack")
    (found,) = litert(data, "xnnpack", [x], every=False).values()
    np.testing.assert_array_equal(Interpreter(graph)(x)[0], found)
    (again,) = litert(to_bytes(graph, batch=5), "xnnpack", [x], every=False).values()
    np.testing.assert_array_equal(again, found)
    for name in ("tflite_reference", "tflite_optimized_x86", "tflite_micro", "tflite_xnnpack_arm"):
        with pytest.raises(ReadError, match="CONV_2D of floats with int8 weights has a kernel of its own under"):
            read(data, target=name)


@pytest.mark.parametrize(
    ("target", "layer", "setting"),
    [
        ("tflite_reference", {}, Dynamic(activations=ASYMMETRIC, per="example")),
        ("tflite_xnnpack", {}, Dynamic(per="example")),
        ("tflite_xnnpack", {}, Dynamic(activations=ASYMMETRIC)),
        ("tflite_xnnpack", {"feature_group_count": 4}, Dynamic(activations=ASYMMETRIC, per="example")),
        (
            "tflite_xnnpack",
            {"input_dilation": 2, "padding": ((0, 0), (0, 0))},
            Dynamic(activations=ASYMMETRIC, per="example"),
        ),
        ("tflite_xnnpack", {"kernel_size": (1, 1)}, Dynamic(activations=ASYMMETRIC, per="example")),
        (
            "tflite_xnnpack",
            {"kernel_size": (1, 1), "padding": ((1, 1), (1, 1))},
            Dynamic(activations=ASYMMETRIC, per="example"),
        ),
    ],
)
@pytest.mark.sampled(1)
def test_what_litert_does_not_have_is_refused(target: str, layer: dict[str, Any], setting: Dynamic) -> None:
    model = nnx.Conv(4, 8, **{"kernel_size": (3, 3), **layer}, rngs=nnx.Rngs(0))
    x = images("normal", 4)
    qmodel = qjax.quantize(model, Recipe(target=target, overrides={".*": setting}), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    assert [node.op for node in graph.ir.nodes] == ["island"]
    assert np.array_equal(graph(x), qjax.exact(qmodel, x)(qmodel, x))
    # a depthwise convolution is no product in the graph, but sums of shifted codes
    why = rf"one that LiteRT does not have under '{target}'|a float part with the step 'reduce_min'"
    with pytest.raises(ValueError, match=why):
        to_bytes(graph.ir)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"target": "tflite_reference"}, "bits in LiteRT's own kernels are not known"),
        ({"target": "tflite_optimized_x86"}, "bits in LiteRT's own kernels are not known"),
        ({"window": (1, 1), "padding": [[1, 0], [0, 0]]}, "one pixel with padding.*pad in front of the layer"),
    ],
)
def test_a_graph_for_a_kernel_that_is_not_known_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(qjax.ConversionError, match=why):
        convolution(**{"window": (3, 3), **settings})


def test_a_target_that_was_not_measured_gets_no_file() -> None:
    graph = convolution((3, 3), target="tflite_micro")
    with pytest.raises(ValueError, match="was not measured for 'tflite_micro'"):
        to_bytes(graph)


@pytest.mark.exhaustive
def test_rows_of_a_convolution_with_one_pixel_are_those_of_a_dense_layer() -> None:
    x = images("normal", 4)
    conv = nnx.Conv(4, 8, (1, 1), use_bias=False, rngs=nnx.Rngs(0))
    dense = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    dense.kernel[...] = conv.kernel[...][0, 0]
    for spec in (QSpec(bits=8), ASYMMETRIC):
        recipe = Recipe(overrides={".*": Dynamic(activations=spec, per="row")})
        graphs = [qjax.convert(qjax.quantize(model, recipe, x), x) for model in (conv, dense)]
        assert np.array_equal(*(graph(x) for graph in graphs))
