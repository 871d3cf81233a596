"""Hand-made graphs that hold everything an artifact can, and equality of graphs."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from qjax.graph.ir import Graph, Node, Quantization, Tensor

UNICODE = "poids/é\u4e2d\U0001f600"
TEXT = 'a"\\\n\u2028'


def quantization(
    qmin: int = -128,
    qmax: int = 127,
    *,
    scale: ArrayLike = 0.1,
    zero_point: ArrayLike | None = None,
    axes: tuple[int, ...] = (),
) -> Quantization:
    zero_point = min(max(0, qmin), qmax) if zero_point is None else zero_point
    scales = np.asarray(scale, np.float32)
    return Quantization(scales, np.asarray(zero_point, np.int32), qmin, qmax, axes)


def constant(name: str, codes, dtype: str, of: Quantization | None = None) -> Tensor:
    value = np.asarray(codes, dtype)
    return Tensor(name, value.shape, dtype, of, value)


def holding(value) -> dict:
    """The attributes of the one operation whose attributes may hold any JSON value: an expression."""
    return {"expression": value, "range": [0, 1]}


def graph_of(*constants: Tensor, value=None, attributes=None, metadata=None) -> Graph:
    """A graph of one reshape that carries the given constants besides; value: held by the attribute of a table."""
    codes = quantization(zero_point=-3)
    flat = Tensor("y", (None, 4) if value is None else (None, 2, 2), "int8", codes)
    pair = constant("pair", [3, -4], "int8")
    tensors = (Tensor("x", (None, 2, 2), "int8", codes), *constants, *(() if value is None else (pair,)), flat)
    op, known = ("reshape", {"shape": [None, 4]}) if value is None else ("table", holding(value))
    node = Node("flatten", op, ("x",), "y", {} if value is None else {"table": "pair"}, attributes or known)
    named = {tensor.name: tensor for tensor in tensors}
    return Graph(named, (node,), ("x",), ("y",), "nearest_even", metadata or {})


def rich_graph() -> Graph:
    """Two nodes; constants of every dtype, packed and plain, scalar and empty, along no, one and two axes."""
    rng = np.random.default_rng(7)
    scales = np.asarray([0.1, 1e-45, 3.4e38, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    halves = np.full((2, 4), 0.5)
    pair = quantization(scale=[0.5, 0.25], zero_point=[3, -4], axes=(1,))
    x = Tensor("x", (None, 5, 4), "int8", quantization(scale=0.1, zero_point=-7))
    tensors = [
        x,
        constant(UNICODE, rng.integers(-8, 8, (5, 4)), "int8", quantization(-8, 7, scale=scales, axes=(1,))),
        constant("w2", rng.integers(-2, 2, (3, 3)), "int8", quantization(-2, 1)),
        constant("w3", rng.integers(-3, 4, (7,)), "int8", quantization(-3, 3)),
        constant("u4", rng.integers(0, 16, (9,)), "uint8", quantization(0, 15, zero_point=8)),
        constant("u2", rng.integers(0, 4, (2, 3)), "uint8", quantization(0, 3)),
        constant("bit", rng.integers(0, 2, (11,)), "uint8", quantization(0, 1)),
        constant("w8", rng.integers(-127, 128, (2, 3, 4)), "int8", quantization(-127, scale=halves, axes=(0, 2))),
        constant("u8", rng.integers(0, 256, (5,)), "uint8", quantization(0, 255, zero_point=128)),
        constant("s16", [-(2**15), 2**15 - 1], "int16"),
        constant("u16", [0, 2**16 - 1], "uint16"),
        constant("s32", [[-(2**31), 2**31 - 1]], "int32"),
        constant("s64", [-(2**63), 2**63 - 1], "int64"),
        constant("scalar", -5, "int32"),
        constant("scalar4", -5, "int8", quantization(-8, 7)),
        constant("empty", np.zeros((0, 3)), "int16"),
        constant("empty4", np.zeros((2, 0)), "int8", quantization(-8, 7)),
        constant("per_channel_zero", [[1, 2]], "int8", pair),
        Tensor("jax", (3,), "int8", None, jnp.asarray([1, -2, 3], jnp.int8)),
        constant("ends", [-100, 100], "int8"),
        Tensor("wide", (None, 5, 4), "int16"),
        Tensor("y", (None, 5, 4), "int8", quantization(-100, 100)),
    ]
    nodes = (
        Node(
            name="première",
            op="table",
            inputs=("x",),
            output="wide",
            constants={"table": "s16", "weights": UNICODE, "bias": "s32"},
            attributes=holding([[1, [2, [None, True]]], (3, (4.5, -0.0)), TEXT, 5e-324]),
            location="model.py:12",
        ),
        Node("second", "table", ("wide",), "y", {"table": "ends", "multiplier": "s32"}, holding(None), None),
    )
    metadata = {"producer": "qjax", "versions": {"jax": "0.12"}, "list": [1, (2, {"deep": None})]}
    return Graph({t.name: t for t in tensors}, nodes, ("x",), ("y", "wide"), "tflite_micro", metadata)


def listed(value):
    """JSON values with tuples as lists: the one change that an artifact makes."""
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return value


def same_json(a, b) -> bool:
    """Equal in value, type, sign of zero and order of keys."""
    return repr(listed(a)) == repr(listed(b))


def same_array(a, b) -> bool:
    """Equal in dtype, shape and every bit."""
    if a is None or b is None:
        return a is b
    left, right = np.asarray(a), np.asarray(b)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def same_quantization(a: Quantization | None, b: Quantization | None) -> bool:
    if a is None or b is None:
        return a is b
    same = same_array(a.scale, b.scale) and same_array(a.zero_point, b.zero_point)
    return same and (a.qmin, a.qmax, a.axes) == (b.qmin, b.qmax, b.axes)


def differences(a: Graph, b: Graph) -> list[str]:
    """The names of the fields in which two graphs differ."""
    found: list[str] = []

    def require(same: bool, place: str) -> None:
        if not same:
            found.append(place)

    require(list(a.tensors) == list(b.tensors), "names of tensors")
    for left, right in zip(a.tensors.values(), b.tensors.values(), strict=False):
        require((left.name, left.shape, left.dtype) == (right.name, right.shape, right.dtype), left.name)
        require(same_quantization(left.quantization, right.quantization), f"{left.name}.quantization")
        require(same_array(left.value, right.value), f"{left.name}.value")
    require(len(a.nodes) == len(b.nodes), "number of nodes")
    for left, right in zip(a.nodes, b.nodes, strict=False):
        for field in ("name", "op", "inputs", "output"):
            require(getattr(left, field) == getattr(right, field), f"{left.name}.{field}")
        # files for others hold no folders of this machine
        lines = [str(node.location).rpartition("/")[2] for node in (left, right)]
        require(lines[0] == lines[1], f"{left.name}.location")
        require(same_json(dict(left.constants), dict(right.constants)), f"{left.name}.constants")
        require(same_json(dict(left.attributes), dict(right.attributes)), f"{left.name}.attributes")
    for field in ("inputs", "outputs", "target"):
        require(getattr(a, field) == getattr(b, field), field)
    require(same_json(dict(a.metadata), dict(b.metadata)), "metadata")
    return found


def assert_equal(a: Graph, b: Graph) -> None:
    """Both hold the same, to the last bit."""
    assert differences(a, b) == []
