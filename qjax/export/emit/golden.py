"""Golden runs, with which emitted files check themselves: inputs, and the integer interpreter's outputs for them."""

from collections.abc import Mapping

import numpy as np

from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter

Case = tuple[list[np.ndarray], list[np.ndarray]]
"""Inputs and outputs of one run, in the graph's order."""


def golden(
    graph: Graph,
    shapes: Mapping[str, tuple[int, ...]],
    count: int,
    seed: int = 0,
    ends: Mapping[str, tuple[int, int]] | None = None,
) -> list[Case]:
    """Runs on the lowest codes, on the highest, then on random ones with edges.

    Args:
      shapes: of the inputs. ends: the lowest and the highest number of inputs with fewer numbers than their dtype.
    """
    rng = np.random.RandomState(seed)
    interpreter = Interpreter(graph)
    cases = list[Case]()
    for index in range(count):
        inputs = [_codes(graph, name, shapes[name], index, rng, (ends or {}).get(name)) for name in graph.inputs]
        cases.append((inputs, [np.asarray(output) for output in interpreter(*inputs)]))
    return cases


def _codes(
    graph: Graph,
    name: str,
    shape: tuple[int, ...],
    index: int,
    rng: np.random.RandomState,
    ends: tuple[int, int] | None,
) -> np.ndarray:
    tensor = graph.tensors[name]
    if tensor.dtype == "float32":
        return (np.array([0.0, 1.0], np.float32)[index] if index < 2 else np.float32(1)) * rng.randn(*shape).astype(
            np.float32
        )
    if ends is not None:
        low, high = ends
    elif tensor.quantization is not None:
        low, high = tensor.quantization.qmin, tensor.quantization.qmax
    else:
        low, high = 0, 1 if tensor.dtype == "bool" else min(int(np.iinfo(tensor.dtype).max), 2**31 - 1)
    if index == 0 and int(np.prod(shape)):
        return np.full(shape, low, tensor.dtype)
    if index == 1:
        return np.full(shape, high, tensor.dtype)
    inner = rng.randint(low, high, shape, dtype=np.int64) + rng.randint(0, 2, shape)
    edges = np.where(rng.randint(0, 2, shape) == 0, low, high)
    return np.where(rng.randint(0, 8, shape) == 0, edges, inner).astype(tensor.dtype)
