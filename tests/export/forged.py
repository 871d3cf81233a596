"""Edits of artifacts as an attacker makes them, who signs the file again."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qjax.graph.ir import Graph
from tests.export.sealed import build, parts

NUMBERS = [0, 1, -1, 2, 3, 7, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 0.5]
OTHERS: list[Any] = [None, True, "", "x", "int8", "uint8", "int16", "int32", "bool", "float32", "floor", [], [0], {}]
OTHERS += [[None], [[0, 0]], [2**31 - 1], [-1], "*/ #error", "n" * 900]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def edit(tree: Any, rng: random.Random) -> str:
    """One edit at one place, as an attacker makes it; what it was, in words."""
    # a place of the outer levels as often as one of the many numbers within long lists
    known = list(places(tree))
    depth = rng.randrange(1, 9)
    path = rng.choice([p for p in known if len(p) <= depth])
    parent, key = at(tree, path[:-1]), path[-1]
    old = parent[key]
    kind = rng.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        # the same field of another entry: a reference to another tensor, the shape of another one
        alike = [p for p in known if p[-1] == key and len(p) == len(path) and p != path]
        parent[key] = copy.deepcopy(at(tree, rng.choice(alike))) if alike else rng.choice(NUMBERS)
    elif kind == 2 and isinstance(old, list) and old:
        rng.choice([old.pop, old.reverse, lambda: old.append(old[0]), old.clear])()
    elif kind == 3:
        parent[key] = copy.deepcopy(rng.choice(OTHERS))
    elif type(old) is int:
        parent[key] = rng.choice([old + 1, old - 1, -old, 2 * old, rng.choice(NUMBERS)])
    elif isinstance(old, list) and old:
        old[rng.randrange(len(old))] = rng.choice(NUMBERS)
    else:
        parent[key] = copy.deepcopy(rng.choice(NUMBERS + OTHERS))
    return f"{'/'.join(map(str, path))}: {str(old)[:60]} -> {str(parent[key])[:60] if kind else 'deleted'}"


def spoil(arrays: dict[str, Any], data: bytearray, rng: random.Random) -> str:
    """Other numbers in one of the arrays, which keeps its shape and its dtype."""
    key = rng.choice(list(arrays))
    begin, end = arrays[key]["data_offsets"]
    data[begin:end] = rng.choice([b"\x00", b"\xff", b"\x7f", b"\x01", b"\x80"]) * (end - begin)
    return f"{key}: other numbers"


def forged(file: bytes, seed: int) -> tuple[bytes, str]:
    """A file with one or two edits and a valid digest, and what they were."""
    rng = random.Random(seed)
    document, arrays, data = parts(file)
    data = bytearray(data)
    said = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        # the program nine times of ten, of it the nodes and the tensors most of the time
        place = rng.random()
        if place < 0.1 and arrays:
            said.append(spoil(arrays, data, rng))
        elif place < 0.2:
            said.append(edit(document, rng))
        elif place < 0.3 and document.get("quantized"):
            said.append(edit(document["quantized"], rng))
        else:
            part = document.get(rng.choice(["nodes", "nodes", "tensors", "metadata"]))
            said.append(edit(part if isinstance(part, list | dict) and part else document, rng))
    return build(document, arrays, bytes(data)), "; ".join(said)


def fed(graph: Graph, batch: int, seed: int = 0) -> list[np.ndarray]:
    """Codes within the ranges that the inputs state."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        shape = [batch if size is None else size for size in tensor.shape]
        q = tensor.quantization
        if tensor.dtype == "bool" or tensor.dtype.startswith("float"):
            found.append(rng.integers(0, 2, shape).astype(tensor.dtype))
            continue
        info = np.iinfo(tensor.dtype)
        low, high = (info.min, info.max) if q is None else (q.qmin, q.qmax)
        found.append(rng.integers(low, high, shape, tensor.dtype, endpoint=True))
    return found
