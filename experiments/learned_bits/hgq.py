"""The same search with HGQ2 0.2.0 (https://pypi.org/project/hgq2/), which is for Keras 3; with JAX behind it.

Its layers, quantizers and losses are its own defaults, as its README shows them: weights have bits of their own, each
input of a layer too. It starts from the same float weights, and sees the same rows in the same order at the same
prices. Run it with `make rivals` and `PYTHONPATH=.rivals`.
"""

import os
import time
from typing import Any

import numpy as np

from experiments.learned_bits.row import Row
from experiments.learned_bits.tasks import CLASSES, HIDDEN, TASKS, Network, float_network, percent, price_at, split

os.environ.setdefault("KERAS_BACKEND", "jax")


def search(name: str, seed: int, every: int, tool: str = "HGQ2", rate: float = 3e-3) -> list[Row]:
    """One training whose price grows; the circuits of every so many epochs."""
    import keras

    task, begin = TASKS[name], time.perf_counter()
    data = split(task)
    x, y = data.train
    keras.utils.set_random_seed(seed)
    model = _model(float_network(task, seed), x.shape[1])
    model.compile(
        keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
    )
    found: list[Row] = []
    rng = np.random.default_rng(seed + 1000)
    for epoch in range(task.epochs):
        for layer in model.layers:
            layer._beta.assign(keras.ops.convert_to_tensor(price_at(task, epoch), dtype=layer._beta.dtype))
        chosen = rng.permutation(len(x))[: len(x) // task.batch * task.batch]
        model.fit(x[chosen], y[chosen], batch_size=task.batch, epochs=1, shuffle=False, verbose=0)
        if (epoch + 1) % every == 0:
            row = Row(name, tool, seed, epoch, price_at(task, epoch))
            weights = model.get_weights()
            _judge(row, model, name)
            model.set_weights(weights)  # tracing has set the bits above the point to those of the rows seen
            row.seconds = time.perf_counter() - begin
            found.append(row)
    return found


def _model(start: Network, inputs: int) -> Any:
    import keras
    from hgq.config import LayerConfigScope, QuantizerConfigScope  # pyright: ignore[reportMissingImports]
    from hgq.layers import QDense  # pyright: ignore[reportMissingImports]

    sizes = (*HIDDEN, CLASSES)
    with (
        QuantizerConfigScope(place="all", default_q_type="kbi", overflow_mode="SAT_SYM"),
        QuantizerConfigScope(place="datalane", default_q_type="kif", overflow_mode="WRAP"),
        LayerConfigScope(enable_ebops=True, beta0=1e-8),
    ):
        layers = [QDense(size, activation="relu" if size != CLASSES else None) for size in sizes]
        model = keras.Sequential([keras.layers.Input((inputs,)), *layers])
    for layer, own in zip(model.layers, start.layers, strict=True):
        layer._kernel.assign(np.asarray(own.kernel[...]))
        assert own.bias is not None
        layer.bias.assign(np.asarray(own.bias[...]))
    return model


def _judge(row: Row, model: Any, name: str) -> None:
    from alkaid.converter import trace_model
    from alkaid.trace import HWConfig, trace
    from hgq.utils import trace_minmax  # pyright: ignore[reportMissingImports]

    data = split(TASKS[name])
    row.ebops = float(trace_minmax(model, data.train[0], verbose=0))
    scores = {part: np.asarray(model.predict(x, verbose=0)) for part, (x, _) in vars(data).items() if part != "train"}
    row.valid, row.test = percent(scores["valid"], data.valid[1]), percent(scores["test"], data.test[1])
    try:
        circuit = trace(*trace_model(model, HWConfig(1, -1, -1)))
    except Exception as error:  # the table says that there is none, and why
        row.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    row.tables = float(circuit.cost)
    emulated = np.asarray(circuit.predict(data.test[0])).reshape(scores["test"].shape)
    row.same = bool(np.array_equal(emulated, scores["test"]))
