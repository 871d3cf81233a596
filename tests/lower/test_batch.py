"""Freeing the batch: which numbers may follow it, and which may not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from qjax.graph.ir import Graph, Node, Tensor
from qjax.lower import ConversionError
from qjax.lower.batch import free_batch
from qjax.run.interpreter import Interpreter
from tests.export.graphs import constant, quantization

CODES = quantization(zero_point=-3)


def graph(batch: int, op: str, attributes: dict, out: tuple[int, ...], *constants: Tensor, inner=(2, 2)) -> Graph:
    x, y = Tensor("x", (batch, *inner), "int8", CODES), Tensor("y", out, "int8", CODES)
    roles = {tensor.name: tensor.name for tensor in constants}
    node = Node("node", op, ("x",), "y", roles, attributes, "user.py:7")
    return Graph({t.name: t for t in (x, *constants, y)}, (node,), ("x",), ("y",), "nearest_even")


def test_shapes_follow_the_batch():
    first, second = (graph(n, "reshape", {"shape": [n * 2, 2]}, (n * 2, 2)) for n in (3, 6))
    free = free_batch(first, second, 3, 6)
    assert free.tensors["x"].shape == (None, 2, 2)
    assert free.tensors["y"].shape == (None, 2)
    assert free.nodes[0].attributes == {"shape": [None, 2]}
    x = np.arange(20, dtype=np.int8).reshape(5, 2, 2)
    assert np.array_equal(Interpreter(free)(x)[0], x.reshape(10, 2))


def test_sizes_that_equal_the_batch_by_chance_stay():
    first, second = (graph(n, "reshape", {"shape": [n, 4]}, (n, 4)) for n in (2, 4))
    free = free_batch(first, second, 2, 4)
    assert free.tensors["x"].shape == (None, 2, 2)
    assert free.tensors["y"].shape == (None, 4)


def test_a_slice_to_the_end_of_the_batch():
    first, second = (
        graph(n, "slice", {"start": [0, 0, 1], "limit": [n, 2, 2], "strides": [1, 1, 1]}, (n, 2, 1)) for n in (3, 6)
    )
    free = free_batch(first, second, 3, 6)
    assert free.nodes[0].attributes["limit"] == [None, 2, 2]
    x = np.arange(20, dtype=np.int8).reshape(5, 2, 2)
    assert np.array_equal(Interpreter(free)(x)[0], x[:, :, 1:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda n: graph(
                n, "slice", {"start": [0] * 3, "limit": [n // 2, 2, 2], "strides": [1] * 3}, (n // 2, 2, 2)
            ),
            r"user.py:7: limit of 'node' \(slice\): \[2, 2, 2\] on a batch of 4 becomes \[4, 2, 2\] on one of 8",
        ),
        (
            lambda n: graph(n, "slice", {"start": [n - 1, 0, 0], "limit": [n, 2, 2], "strides": [1] * 3}, (1, 2, 2)),
            r"user.py:7: start of 'node' \(slice\): \[3, 0, 0\] on a batch of 4 becomes \[7, 0, 0\]",
        ),
        (
            lambda n: graph(n, "slice", {"start": [0] * 3, "limit": [n, 2, 2], "strides": [2, 1, 1]}, (n // 2, 2, 2)),
            r"user.py:7: tensor 'y': \(2, 2, 2\) on a batch of 4 becomes \(4, 2, 2\)",
        ),
        (
            lambda n: graph(n, "reshape", {"shape": [n // 2, 8]}, (n // 2, 8)),
            r"user.py:7: shape of 'node' \(reshape\): \[2, 8\] on a batch of 4 becomes \[4, 8\]",
        ),
        (
            lambda n: graph(n, "split", {"sizes": [n // 2, n // 2], "axis": 0, "index": 0}, (n // 2, 2, 2)),
            r"user.py:7: sizes of 'node' \(split\): \[2, 2\] on a batch of 4 becomes \[4, 4\]",
        ),
        (
            lambda n: graph(n, "pad", {"padding": [[0, n, 0], [0, 0, 0], [0, 0, 0]]}, (2 * n, 2, 2)),
            r"user.py:7: padding of 'node' \(pad\)",
        ),
        (
            lambda n: graph(n, "affine_step", {}, (n, 2, 2), constant("divisor", n, "int32")),
            "user.py:7: tensor 'divisor': 4 on a batch of 4 becomes 8 on one of 8",
        ),
        (
            lambda n: graph(n, "affine_step", {}, (n, 2, 2), constant("token", np.zeros((n, 2)), "int8")),
            r"user.py:7: tensor 'token': \(4, 2\) on a batch of 4 becomes \(8, 2\)",
        ),
        (
            lambda n: graph(n, "reshape" if n == 4 else "transpose", {}, (n, 4)),
            r"user.py:7: the model runs other operations on a batch of 4 than on one of 8 \('reshape' and 'transpose'",
        ),
        (
            lambda n: graph(n, "broadcast", {"shape": [n, n, 2, 2], "dimensions": [0, 2, 3]}, (n, n, 2, 2)),
            r"user.py:7: 'node' repeats a tensor of shape \(None, 2, 2\) for every example of the batch",
        ),
    ],
)
def test_numbers_that_may_not_follow_the_batch(make, message):
    with pytest.raises(ConversionError, match=message):
        free_batch(make(4), make(8), 4, 8)


def test_a_broadcast_along_other_axes():
    first, second = (
        graph(n, "broadcast", {"shape": [n, 3, 2, 2], "dimensions": [0, 2, 3]}, (n, 3, 2, 2)) for n in (4, 8)
    )
    free = free_batch(first, second, 4, 8)
    x = jnp.arange(12, dtype=jnp.int8).reshape(3, 2, 2)
    assert np.array_equal(Interpreter(free)(x)[0], np.repeat(np.asarray(x)[:, None], 3, axis=1))


def test_constants_of_parameters_need_no_data_in_the_second_graph():
    first = graph(4, "affine_step", {}, (4, 2, 2), constant("w", [1, 2], "int8"))
    second = graph(8, "affine_step", {}, (8, 2, 2), constant("w", [1, 2], "int8"))
    hollow = dataclasses.replace(second.tensors["w"], value=None)
    free = free_batch(first, second.replace(tensors={**second.tensors, "w": hollow}), 4, 8)
    assert np.array_equal(np.asarray(free.tensors["w"].value), [1, 2])
