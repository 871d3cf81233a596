"""Ways to quantize a network after training: name -> a function of the network and the setting.

Every method sees the same calibration batches and is judged by its outputs for the same test batches.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx

import qjax
from experiments.real.network import Network, Outputs


@dataclasses.dataclass(frozen=True)
class Setting:
    """Bits of weights and of activations."""

    weights: int
    activations: int

    def __str__(self) -> str:
        return f"W{self.weights}A{self.activations}"


SETTINGS = {str(setting): setting for setting in (Setting(8, 8), Setting(4, 8), Setting(4, 4))}


@dataclasses.dataclass(frozen=True)
class Result:
    """Outputs for the test batches, and what else goes into the row."""

    outputs: Outputs
    seconds: float
    differ: int | None = None
    note: str = ""


Method = Callable[..., Result]


def outputs_of(call: Callable[..., Any], batches: Sequence[tuple[np.ndarray, ...]]) -> Outputs:
    """What a function returns for all batches, joined along the examples."""
    found = [call(*batch) for batch in batches]
    parts = [out if isinstance(out, tuple) else (out,) for out in found]
    return tuple(np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(len(parts[0])))


def in_batches(call: Callable[..., tuple[np.ndarray, ...]], size: int) -> Callable[..., tuple[np.ndarray, ...]]:
    """A function of batches of one size, for batches of any size: the last part is filled with its last example."""

    def of_any(*batch: np.ndarray) -> tuple[np.ndarray, ...]:
        parts: list[Any] = []
        for start in range(0, len(batch[0]), size):
            rows = [array[start : start + size] for array in batch]
            short = size - len(rows[0])
            full = [np.concatenate([a, np.repeat(a[-1:], short, axis=0)]) if short else a for a in rows]
            parts.append([np.asarray(out)[: size - short] for out in call(*full)])
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    return of_any


def float_outputs(network: Network) -> Outputs:
    """The float network's."""
    call = nnx.jit(lambda model, *args: model(*args))
    return outputs_of(lambda *args: call(network.model, *args), network.test)


def recipe(setting: Setting) -> qjax.Recipe:
    """Every layer at the setting's bits, the first and the last included."""
    return qjax.Recipe(
        weights=qjax.QSpec(bits=setting.weights, axis=-1),
        activations=qjax.QSpec(bits=setting.activations, symmetric=False),
    )


def judged(qmodel: qjax.QuantizedModel, network: Network, seconds: float, *, exact: bool, note: str = "") -> Result:
    """The integer graph's outputs; with `exact`, also in how many the exact forward differs from them on a batch."""
    qmodel.eval()
    graph = qjax.convert(qmodel, network.calibration[0])
    outputs = outputs_of(graph, network.test)
    differ = None
    if exact:
        forward = nnx.jit(qjax.exact(qmodel, network.calibration[0]))
        found = outputs_of(lambda *args: forward(qmodel, *args), network.test[:1])
        differ = sum(int(np.sum(x != y[: len(x)])) for x, y in zip(found, outputs, strict=True))
    return Result(outputs, seconds, differ, note)


def calibrated(network: Network, setting: Setting, *, exact: bool) -> Result:
    """`quantize` and `calibrate`, as the README has it."""
    begin = time.perf_counter()
    qmodel = qjax.quantize(network.model, recipe(setting), network.calibration[0])
    qjax.calibrate(qmodel, network.calibration, progress=False)
    return judged(qmodel, network, time.perf_counter() - begin, exact=exact)


def post_trained(network: Network, setting: Setting, *, exact: bool, **options: Any) -> Result:
    """`qjax.post_training`; the note lists its steps with the noise of the outputs on held-out calibration data."""
    begin = time.perf_counter()
    qmodel = qjax.post_training(network.model, recipe(setting), network.calibration, progress=False, **options)
    seconds = time.perf_counter() - begin
    report = qmodel.post_training_report
    assert report is not None
    return judged(qmodel, network, seconds, exact=exact, note=_steps(report))


def at_run_time(network: Network, setting: Setting, *, exact: bool) -> Result:
    """`qjax.Dynamic`: products of integers with scales found at run time.

    A row has a scale of its own, or an example where the network has windows. Between products
    the tensors are float, as with `quantize_dynamic` and qwix.
    """
    per = "example" if any(isinstance(part, nnx.Conv) for _, part in nnx.iter_graph(network.model)) else "row"
    own = recipe(setting)
    begin = time.perf_counter()
    everywhere = qjax.Dynamic(weights=own.weights, activations=own.activations, per=per)
    qmodel = qjax.quantize(network.model, qjax.Recipe(overrides={".*": everywhere}), network.calibration[0])
    return judged(qmodel, network, time.perf_counter() - begin, exact=exact, note=f"one scale for each {per}")


def _steps(report: Any) -> str:
    said: list[str] = []
    for step in report.steps:
        state = "skipped" if step.kept is None else "" if step.kept else "taken back"
        said.append(f"{step.step} {state or f'{step.score.decibels:.1f} dB'} ({step.seconds:.0f} s)")
    return ", ".join(said)


METHODS: dict[str, Method] = {
    "calibrate": calibrated,
    "post_training": post_trained,
    "Dynamic": at_run_time,
    **{
        f"post_training, {step} alone": functools.partial(post_trained, steps=[step])
        for step in ("precision", "gptq", "bias")
    },
}
