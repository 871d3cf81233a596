"""The search with qjax: `LearnedBits`, and the circuit that `emit("rtl")` would write."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from experiments.accuracy.train import cross_entropy
from experiments.learned_bits.row import Row
from experiments.learned_bits.tasks import TASKS, Task, float_network, percent, price_at, split
from qjax.contrib.rtl import circuit_of
from qjax.training import LearnedBits

RECIPE = qjax.Recipe(
    "fpga",
    weights=qjax.QSpec(bits=8),
    activations=qjax.QSpec(bits=8),
    method="tqt",
    weight_method="tqt",
)
"""Scales that are powers of two, and eight bits to begin with."""


def search(name: str, seed: int, every: int, tool: str = "qjax", per: Any = "channel") -> list[Row]:
    """One training whose price grows; the circuits of every so many epochs."""
    task, begin = TASKS[name], time.perf_counter()
    data = split(task)
    x, y = data.train
    qmodel = qjax.quantize(float_network(task, seed), RECIPE, x[:1000])
    learner = LearnedBits(qmodel, x[:4], per=per)
    optimizer = learner.optimizer(task.rate)
    found: list[Row] = []
    rng = np.random.default_rng(seed + 1000)
    for epoch in range(task.epochs):
        chosen = rng.permutation(len(x))[: len(x) // task.batch * task.batch].reshape(-1, task.batch)
        _epoch(learner, optimizer, jnp.asarray(x[chosen]), jnp.asarray(y[chosen]), jnp.float32(price_at(task, epoch)))
        if (epoch + 1) % every == 0:
            row = Row(name, tool, seed, epoch, price_at(task, epoch))
            _judge(row, learner.finish(), task)
            row.seconds = time.perf_counter() - begin
            found.append(row)
    return found


@nnx.jit
def _epoch(learner: LearnedBits, optimizer: Any, x: jax.Array, y: jax.Array, price: jax.Array) -> None:
    def loss(learner: LearnedBits, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(learner, None, x, y) + price * learner.ebops()

    @functools.partial(nnx.scan, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
    def steps(carry: Any, x: jax.Array, y: jax.Array) -> Any:
        learner, optimizer = carry
        optimizer.update(learner, nnx.grad(loss)(learner, x, y))
        return carry

    steps((learner, optimizer), x, y)


def _judge(row: Row, qmodel: qjax.QuantizedModel, task: Task) -> None:
    data = split(task)
    qmodel.eval()
    row.ebops = qjax.training.ebops(qmodel, data.train[0][:4])
    graph = qjax.convert(qmodel, data.train[0][:4])
    row.valid, row.test = (percent(graph(x), y) for x, y in (data.valid, data.test))
    circuit = circuit_of(graph.ir)
    row.tables = float(circuit.logic.cost)
    codes = graph.quantize(data.test[0])
    shipped = np.asarray(graph.run(codes))
    emulated = np.asarray(circuit.logic.predict(np.asarray(codes, np.float64))).reshape(shipped.shape)
    trained = np.asarray(qmodel(data.test[0]))
    row.same = np.array_equal(emulated, shipped) and np.array_equal(graph.dequantize(shipped), trained)
    jax.clear_caches()
