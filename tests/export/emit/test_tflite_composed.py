"""Operations that LiteRT has no operator for, as chains of operators: the runtime's codes, and how good they are."""

from typing import Any

import numpy as np
import pytest

from qjax import targets
from qjax.assign import assign
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.run.interpreter import Interpreter
from tests.export.emit.tflite_runtimes import MODES, compared

ROWS, WIDTH = 6, 24
_RNG = np.random.default_rng(0)
GAMMA = (1 + 0.3 * _RNG.standard_normal(WIDTH)).astype(np.float32)
BETA = (0.3 * _RNG.standard_normal(WIDTH)).astype(np.float32)
LAYER = {
    "axes": [2],
    "center": True,
    "divisor": 0,
    "epsilon": 1e-6,
    "joined": "add",
    "groups": 1,
    "feature_axes": [2],
}
NORMS: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray]]] = {
    "layer": ("int8", LAYER, {"scale": GAMMA, "bias": BETA}),
    "root mean square": ("int8", {**LAYER, "center": False}, {"scale": GAMMA}),
    "largest root, divisor": ("int8", {**LAYER, "joined": "max", "epsilon": 0.5, "divisor": 1, "feature_axes": []}, {}),
    "layer, 16 bits": ("int16", LAYER, {"scale": GAMMA, "bias": BETA}),
    "root mean square, 16 bits": ("int16", {**LAYER, "center": False}, {"scale": GAMMA}),
}


def grid(dtype: str, reach: float, zero_point: int = 0) -> Quantization:
    """Codes up to `reach` above and below."""
    info = np.iinfo(dtype)
    low = info.min if dtype == "int8" else -info.max
    scale = np.asarray(reach / info.max, np.float32)
    return Quantization(scale, np.asarray(zero_point, np.int32), low, info.max)


def quantized(
    op: str,
    inputs: list[tuple[tuple[int | None, ...], str, Quantization | None]],
    output: tuple[tuple[int | None, ...], str, Quantization],
    attributes: dict[str, Any],
    constants: dict[str, np.ndarray],
    factor: float | None = None,
) -> Graph:
    """The quantized graph of one node, with a factor behind it."""
    tensors = {f"x{i}": Tensor(f"x{i}", shape, dtype, q) for i, (shape, dtype, q) in enumerate(inputs)}
    names = tuple(tensors)
    tensors |= {role: Tensor(role, value.shape, "float32", None, value) for role, value in constants.items()}
    tensors |= {name: Tensor(name, output[0], "int32") for name in ("sum", "product")}
    tensors["y"] = Tensor("y", *output)
    nodes, last = [Node("sum", op, names, "sum", {role: role for role in constants}, attributes)], "sum"
    if factor is not None:
        tensors["factor"] = Tensor("factor", (), "float32", None, np.asarray(factor, np.float32))
        nodes.append(Node("product", "affine_step", ("sum",), "product", {"value": "factor"}, {"step": "mul"}))
        last = "product"
    return Graph(tensors, (*nodes, Node("y", "quantize", (last,), "y")), names, ("y",), "")


def norm(name: str) -> Graph:
    dtype, attributes, constants = NORMS[name]
    shape = (None, ROWS, WIDTH)
    x, y = grid(dtype, 8, 5 if dtype == "int8" else 0), grid(dtype, 4, -9 if dtype == "int8" else 0)
    return quantized("normalize", [(shape, dtype, x)], (shape, dtype, y), attributes, constants)


def softmax(scale: float) -> Graph:
    shape = (None, 2, ROWS, WIDTH)
    unit = Quantization(np.asarray(1 / 256, np.float32), np.asarray(-128, np.int32), -128, 127)
    masks: list[tuple[tuple[int | None, ...], str, None]] = [
        ((ROWS, WIDTH), "bool", None),
        ((None, WIDTH), "bool", None),
    ]
    attributes = {
        "axes": [3],
        "mask_axes": [[None, None, 0, 1], [0, None, None, 1]],
        "mask_inverted": [True, False],
        "empty": "uniform",
    }
    return quantized(
        "softmax", [(shape, "int8", grid("int8", 127 * scale, 11)), *masks], (shape, "int8", unit), attributes, {}
    )


def product(dtype: str) -> Graph:
    numbers = {"lhs_contracting": [2], "rhs_contracting": [2], "lhs_batch": [0], "rhs_batch": [0]}
    shape, zero = (None, ROWS, 8), 3 if dtype == "int8" else 0
    inputs: list[Any] = [(shape, dtype, grid(dtype, 4, zero)), (shape, dtype, grid(dtype, 3, -zero))]
    attributes = {**numbers, "weight": None, "channels": [], "rank": 3, "permutation": None}
    return quantized("dot", inputs, ((None, ROWS, ROWS), dtype, grid(dtype, 6, zero)), attributes, {}, 0.3)


CHAINS = {
    **{name: (norm, name) for name in NORMS},
    "masked softmax": (softmax, 0.1),
    "masked softmax of small numbers": (softmax, 0.002),
    "product with a factor": (product, "int8"),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("target", MODES)
@pytest.mark.sampled(3)
def test_every_operator_of_a_chain_is_the_runtimes(name, target):
    make, argument = CHAINS[name]
    graph = assign(make(argument), targets.get(target))
    assert len(graph.nodes) > 1
    count, wrong = compared(graph, batch=4)
    assert wrong == {}
    assert count > 500


@pytest.mark.parametrize("name", ["layer", "root mean square"])
def test_a_norm_of_8_bits_is_within_one_code_of_the_exact_one(name):
    codes = np.random.default_rng(1).integers(-128, 128, (16, ROWS, WIDTH)).astype(np.int8)
    chain, exact = (assign(norm(name), targets.get(target)) for target in ("tflite_reference", "nearest_even"))
    found, wanted = (np.asarray(Interpreter(graph)(codes)[0]).astype(int) for graph in (chain, exact))
    assert np.abs(found - wanted).max() <= 1
    assert np.mean(found != wanted) < 0.1


@pytest.mark.parametrize("scale", [0.1, 0.002])
def test_hidden_elements_have_the_probability_zero(scale):
    rng = np.random.default_rng(2)
    codes = rng.integers(-128, 128, (4, 2, ROWS, WIDTH)).astype(np.int8)
    hides, shows = rng.random((ROWS, WIDTH)) < 0.5, rng.random((4, WIDTH)) < 0.8
    shown = ~hides & shows[:, None, None, :]
    (y,) = Interpreter(assign(softmax(scale), targets.get("tflite_reference")))(codes, hides, shows)
    shares = (np.asarray(y).astype(int) + 128) / 256
    assert (shares[~np.broadcast_to(shown, codes.shape)] == 0).all()
    powers = np.exp(codes * np.float64(scale)) * shown
    assert np.abs(shares - powers / powers.sum(-1, keepdims=True)).max() < 2 / 256
