"""`qjax.Dynamic` in .tflite files: the graph, the exact forward, LiteRT and the graph read back have equal floats."""

import itertools
from typing import Any

import numpy as np
import pytest

import qjax
from conformance.cpu import is_this
from qjax import Dynamic, Recipe
from qjax.assign.retarget import retarget
from qjax.contrib.importers.tflite import read
from qjax.export.emit.tflite import to_bytes
from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.file import File, Scales
from qjax.run.interpreter import Interpreter
from tests.export.emit.dynamic_graphs import KINDS, product, rows
from tests.export.emit.tflite_runtimes import MODES, litert
from tests.layers.dynamic_models import ASYMMETRIC, MLP, Stack, X

F32 = np.float32
SIZES = ((64, 96, 200), (17, 63, 31), (9, 512, 1))
"""n, depth, count of rows: one row has kernels of its own."""
PRODUCTS: dict[str, dict[str, Any]] = {
    "tflite_xnnpack": {},
    "tflite_xnnpack, int4": {"bits": 4},
    "tflite_xnnpack, blocks of 32": {"bits": 4, "group": 32},
    "tflite_xnnpack, blocks of 96": {"bits": 4, "group": 96},
    "tflite_optimized_x86": {},
    "tflite_optimized_x86, symmetric": {"symmetric": True},
    "tflite_reference, int4": {"bits": 4},
    "tflite_reference, symmetric": {"symmetric": True},
}


VNNI = pytest.mark.skipif(
    not is_this("AVX-512 VNNI"), reason="XNNPACK's blockwise kernels have other last bits on a CPU without AVX-512 VNNI"
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=VNNI) if "blocks" in n else n for n in PRODUCTS])
def test_products_have_the_floats_of_the_runtime(name: str) -> None:
    target, settings = name.split(",")[0], PRODUCTS[name]
    compared = 0
    for n, depth, count in SIZES:
        if depth % settings.get("group", 1):
            continue
        graph = product(target, n, depth, **settings)
        data, run = to_bytes(graph), Interpreter(graph)
        for kind in KINDS:
            x = rows(kind, count, depth)
            (found,) = litert(data, MODES[target], [x], every=False).values()
            np.testing.assert_array_equal(np.asarray(run(x)[0]), found)
            compared += found.size
        assert np.array_equal(Interpreter(read(data))(x)[0], run(x)[0])
    assert compared > 60_000


def test_the_formulas_differ() -> None:
    x = rows("ties", 200, 96)
    names = ("tflite_xnnpack", "tflite_reference", "onnxruntime")
    asymmetric = [np.asarray(Interpreter(product(name, 64, 96))(x)[0]) for name in names]
    symmetric = [np.asarray(Interpreter(product(name, 64, 96, symmetric=True))(x)[0]) for name in names[1:]]
    assert all((a != b).any() for a, b in itertools.pairwise(asymmetric))
    assert (symmetric[0] != symmetric[1]).any()
    # XNNPACK's rows have a zero point, whatever the file says
    assert np.array_equal(Interpreter(product(names[0], 64, 96, symmetric=True))(x)[0], asymmetric[0])


def converted(target: str, setting: Dynamic, paths: str, model: type = MLP) -> Any:
    qmodel = qjax.quantize(model(), Recipe(target=target, overrides={paths: setting}), X)
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, X)


@pytest.mark.parametrize(
    ("model", "paths"), [(MLP, ".*"), (MLP, "first"), (MLP, "last"), (Stack, "block/mlp/(up|down)")]
)
@pytest.mark.sampled(1)
def test_models(model: type, paths: str) -> None:
    qmodel, graph = converted("tflite_xnnpack", Dynamic(per="row", activations=ASYMMETRIC), paths, model)
    x = rows("normal", 300, 8)
    codes = np.asarray(graph.quantize(x))
    expected = np.asarray(graph.run(codes))
    data = to_bytes(graph.ir, batch=len(x))
    (found,) = litert(data, "xnnpack", [codes], every=False).values()
    np.testing.assert_array_equal(found, expected)
    again = read(data)
    np.testing.assert_array_equal(Interpreter(again)(codes)[0], expected)
    reals = graph.dequantize(expected) if expected.dtype == np.int8 else expected
    np.testing.assert_array_equal(qjax.exact(qmodel, X)(qmodel, x), reals)


def of_another_tool(dtype: str, block: int | None) -> bytes:
    """As ai-edge-quantizer writes dynamic-range models: biases and activations in the operator."""
    rng, file = np.random.default_rng(0), File()
    x = index = file.tensor("x", (1, 64), "float32", signature=(-1, 64))
    most = 7 if dtype == "int4" else 127
    for place, (depth, n, activation) in enumerate(((64, 128, "RELU"), (128, 96, "RELU6"), (96, 10, "NONE"))):
        codes = rng.integers(-most, most + 1, (n, depth)).astype(np.int8)
        scale = (rng.random((n, depth // block) if block else n) * 0.02 + 0.001).astype(F32)
        kernel = file.tensor(f"{place}/w", (n, depth), dtype, Scales(scale, block=block), codes)
        bias = file.tensor(f"{place}/b", (n,), "float32", data=rng.normal(size=n).astype(F32))
        y = file.tensor(f"{place}/y", (1, n), "float32", signature=(-1, n))
        file.operator("FULLY_CONNECTED", [index, kernel, bias], [y], fusedActivationFunction=activation)
        index = y
    return bytes(file.to_bytes([x], [index]))


@pytest.mark.parametrize(
    ("dtype", "block", "names"),
    [
        ("int8", None, ("tflite_xnnpack", "tflite_optimized_x86", "tflite_reference")),
        ("int4", None, ("tflite_xnnpack", "tflite_reference")),
        pytest.param("int4", 32, ("tflite_xnnpack",), marks=VNNI),
    ],
)
def test_files_of_other_tools(dtype: str, block: int | None, names: tuple[str, ...]) -> None:
    data = of_another_tool(dtype, block)
    x = rows("normal", 200, 64)
    for name in names:
        graph = read(data, target=name)
        (found,) = litert(data, MODES[name], [x], every=False).values()
        np.testing.assert_array_equal(Interpreter(graph)(x)[0], found)
        (again,) = litert(to_bytes(graph), MODES[name], [x], every=False).values()
        np.testing.assert_array_equal(again, found)
    for name in {"tflite_reference", "tflite_optimized_x86", "tflite_micro"} - {*names}:
        with pytest.raises(ReadError, match=r"has a kernel of its own under .*, which qjax does not reproduce"):
            read(data, target=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "setting", "why"),
    [
        ("tflite_xnnpack", Dynamic(per="row"), "one that LiteRT does not have"),
        ("tflite_xnnpack", Dynamic(activations=ASYMMETRIC), "one that LiteRT does not have"),
        ("tflite_micro", Dynamic(per="row", activations=ASYMMETRIC), "one that LiteRT does not have"),
        ("tflite_xnnpack_arm", Dynamic(per="row", activations=ASYMMETRIC), "one that LiteRT does not have"),
    ],
)
def test_refused_products(target: str, setting: Dynamic, why: str) -> None:
    _, graph = converted(target, setting, "first")
    with pytest.raises(ValueError, match=rf"{why} under '{target}'.*use qjax.Dynamic\(per=\"row\", activations="):
        to_bytes(graph.ir)


def test_refused_steps_and_targets() -> None:
    _, graph = converted("tflite_xnnpack", Dynamic(per="row", activations=ASYMMETRIC), "last")
    with pytest.raises(ValueError, match="codes with a zero point that become floats, which this runtime computes"):
        to_bytes(graph.retarget("tflite_optimized_x86").ir)
    with pytest.raises(ValueError, match="was not measured for 'tflite_xnnpack_arm'"):
        to_bytes(graph.retarget("tflite_xnnpack_arm").ir)
    _, graph = converted("tflite_xnnpack", Dynamic(per="row", activations=ASYMMETRIC), "first")
    with pytest.raises(
        ValueError, match="whose result becomes codes, which this runtime's QUANTIZE rounds differently"
    ):
        to_bytes(graph.retarget("tflite_reference").ir)
    blocks = product("tflite_xnnpack", 4, 64, bits=4, group=32)
    with pytest.raises(qjax.ConversionError, match="weights in groups, whose arithmetic in LiteRT's own"):
        retarget(blocks, "tflite_reference")
