"""Runs a study: states its predictions, measures, compares, and writes the page."""

import dataclasses
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from qjax.contrib.lab.machine import machine
from qjax.contrib.lab.pages import page, shown
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study
from qjax.export import files


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished study.

    Args:
      study, settings: what ran.
      predictions: all of them, as they were stated.
      measurement: the measured values.
      seconds: the time that predictions (some need a trained network) and measurement took.

    Examples:
      >>> from qjax.contrib.lab import Measurement, Prediction, Result, Settings, Study
      >>> predictions = [Prediction("heads", 0.4, 0.6, "a fair coin")]
      >>> study = Study(
      ...     "coin", "A coin", "Is it fair?", "Throws.", lambda _: [], lambda _: None, print
      ... )
      >>> measurement = Measurement({"heads": 0.9}, [], {}, "It is not.")
      >>> Result(study, Settings(), predictions, measurement, seconds=0.1).left
      [Prediction(name='heads', low=0.4, high=0.6, why='a fair coin')]
    """

    study: Study
    settings: Settings
    predictions: Sequence[Prediction]
    measurement: Measurement
    seconds: float

    @property
    def left(self) -> list[Prediction]:
        """The predictions that failed, because the measured value lies outside of the band."""
        return [p for p in self.predictions if not p.holds(self.measurement.values[p.name])]


def run(study: Study, settings: Settings, console: Console | None = None) -> Result:
    """State the predictions, measure, and compare.

    Args:
      study: what to run.
      settings: its seed and its size.
      console: where the progress is printed; None: standard error.

    Raises:
      ValueError: a study that does not measure what it predicts, or predicts the same thing twice.

    Examples:
      ```python
      from qjax.contrib.lab import Measurement, Prediction, Settings, Study, run

      study = Study(
          "coin",
          "A coin",
          "How often do heads come up?",
          "One throw.",
          predict=lambda settings: [Prediction("heads", 0, 1, "a share")],
          measure=lambda settings: Measurement({"heads": 1.0}, [], {}, "It was heads."),
          draw=lambda figure, data: None,
      )
      result = run(study, Settings(seed=0))
      ```
    """
    console = console or Console(stderr=True)
    console.print(f"[bold]{study.name}[/bold]: {study.title}")
    start = time.perf_counter()
    predictions = tuple(study.predict(settings))
    twice = {p.name for i, p in enumerate(predictions) if p.name in {q.name for q in predictions[:i]}}
    if twice:
        raise ValueError(
            f"{study.name}: predicted twice: {', '.join(sorted(twice))}. Give each prediction its own name."
        )
    for p in predictions:
        console.print(f"predicted {shown(p.low)} .. {shown(p.high)}: {p.name}", style="dim", highlight=False)
    measurement = study.measure(settings)
    seconds = time.perf_counter() - start
    if set(measurement.values) != {p.name for p in predictions}:
        missing = {p.name for p in predictions} ^ set(measurement.values)
        raise ValueError(
            f"{study.name}: expected a measured value for each prediction and no others, but "
            f"{', '.join(sorted(missing))} is only predicted or only measured."
        )
    result = Result(study, settings, predictions, measurement, seconds)
    table = Printed("prediction", "band", "measured", "")
    for p in predictions:
        value = measurement.values[p.name]
        mark = "holds" if p.holds(value) else "[red]OUTSIDE[/red]"
        table.add_row(p.name, f"{shown(p.low)} .. {shown(p.high)}", shown(value), mark)
    console.print(table)
    console.print(f"{seconds:.0f} s\n")
    return result


def write(result: Result, folder: Path) -> None:
    """Write `NAME.json`, `NAME.png` and `NAME.md` to a folder, all of them or none.

    Args:
      result: what `run` returned.
      folder: created if it is missing.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      TypeError: the study's data are not JSON.

    Examples:
      ```python
      from pathlib import Path

      from qjax.contrib.lab import Measurement, Prediction, Settings, Study, run, write

      study = Study(
          "coin",
          "A coin",
          "How often do heads come up?",
          "One throw.",
          predict=lambda settings: [Prediction("heads", 0, 1, "a share")],
          measure=lambda settings: Measurement(
              {"heads": 1.0}, [], {"heads": 1.0}, "It was heads."
          ),
          draw=lambda figure, data: figure.subplots().bar(list(data), list(data.values())),
      )
      write(run(study, Settings(seed=0)), Path("."))  # coin.md, coin.png, coin.json
      ```
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = result.study.name
    document = {
        "study": name,
        "settings": dataclasses.asdict(result.settings),
        "predictions": [
            {
                **dataclasses.asdict(p),
                "measured": result.measurement.values[p.name],
                "holds": p not in result.left,
            }
            for p in result.predictions
        ],
        "tables": [dataclasses.asdict(table) for table in result.measurement.tables],
        "data": result.measurement.data,
        "conclusion": result.measurement.conclusion,
        "seconds": round(result.seconds, 1),
        "machine": machine(),
    }
    documents = {
        f"{name}.json": json.dumps(_plain(document), indent=1, allow_nan=False) + "\n",
        f"{name}.md": page(result),
    }
    contents = {str(folder / file): text.encode() for file, text in documents.items()}
    files.write_all({**contents, str(folder / f"{name}.png"): _picture(result)})


def _picture(result: Result) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('Drawing a study needs matplotlib: pip install "qjax-quant[lab]".') from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws to files; works without a display
    result.study.draw(figure, result.measurement.data)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _plain(value: Any) -> Any:
    """The value in JSON's types; a number that JSON does not have (NaN, an infinity) becomes its name."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"a study's data must be JSON, got {type(value).__name__}")
