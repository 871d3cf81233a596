"""Records scalars of a training run step by step, for `qjax.report` and, through any metric writer, for TensorBoard."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from qjax.model.quantized_model import QuantizedModel
from qjax.training.oscillations import Oscillations

OSCILLATING = 0.005
"""Reversals per step from which a weight counts as oscillating, as in `Oscillations.share`."""


class ScalarWriter(Protocol):
    """The interface of a writer of `clu.metric_writers`, which sends scalars to TensorBoard, a file or a service.

    Examples:
      >>> from qjax.training import TrainingLog
      >>> class Printer:
      ...     def write_scalars(self, step, scalars):
      ...         print(step, scalars)
      >>> TrainingLog(Printer()).write_scalars(0, {"loss": 2.5})
      0 {'loss': 2.5}
    """

    def write_scalars(self, step: int, scalars: Mapping[str, Any], /) -> None:
        """Write the scalars of one step, by their names."""
        ...


class TrainingLog:
    """Records the scalars of a training run, and passes them on to a writer.

    `qjax.report(qmodel, batches, training=log)` draws them as curves. The log itself has `write_scalars`, so it can
    be used wherever a metric writer is expected.

    curves: name -> [(step, value), ...], in the order of writing.

    Args:
      writer: any object with `write_scalars(step, scalars)`, such as one of clu; it receives everything that is
        written.

    Example:
      >>> log = TrainingLog()
      >>> log.write_scalars(0, {"loss": 2.5})
      >>> log.write_scalars(10, {"loss": 1.5})
      >>> log.curves
      {'loss': [(0, 2.5), (10, 1.5)]}
    """

    def __init__(self, writer: ScalarWriter | None = None) -> None:
        if writer is not None and not callable(getattr(writer, "write_scalars", None)):
            raise TypeError(
                f"TrainingLog: expected a writer with the method write_scalars(step, scalars), got "
                f"{type(writer).__name__}. For TensorBoard: clu.metric_writers.SummaryWriter(folder)."
            )
        self.writer = writer
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Record numbers under their names.

        Args:
          step: a whole number; the steps need not begin at 0 or grow by 1.
          scalars: name -> a Python number or an array of one element.
        """
        numbers = jax.device_get(list(scalars.values()))  # a list, because JAX would sort the names of a dict
        values = {name: float(np.asarray(number)) for name, number in zip(scalars, numbers, strict=True)}
        for name, value in values.items():
            self.curves.setdefault(name, []).append((int(step), value))
        if self.writer is not None:
            self.writer.write_scalars(int(step), values)

    def write(
        self,
        step: int,
        qmodel: QuantizedModel | None = None,
        oscillations: Oscillations | None = None,
        **scalars: Any,
    ) -> None:
        """Record the scales of a model, the oscillation of its weights, and your own scalars such as loss=loss.

        Call it outside of jit, for example every 10 steps: it reads the numbers from the device.

        Args:
          step: see `write_scalars`.
          qmodel: writes "scale/NAME" for every quantizer: the geometric mean of its scales.
          oscillations: writes "oscillating/NAME" for every weight that it follows: the share of the weight's elements
            that reverse more often than 0.005 times per step. Frozen elements do not count.
          scalars: recorded under their own names.
        """
        found: dict[str, Any] = {}
        if qmodel is not None:
            for name, qparams in qmodel.qparams().items():
                scale = np.asarray(qparams.scale, np.float64)
                found[f"scale/{name}"] = math.exp(float(np.mean(np.log(scale))))
        if oscillations is not None:
            for name, frequency in oscillations.frequency.items():
                turns = (np.asarray(frequency) > OSCILLATING) & ~np.asarray(oscillations.frozen[name])
                found[f"oscillating/{name}"] = float(np.mean(turns))
        self.write_scalars(step, {**found, **scalars})
