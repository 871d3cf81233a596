"""Writes a study's page: question, answer and picture first; then method, predictions and measurements."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qjax.contrib.lab.machine import machine

if TYPE_CHECKING:
    from qjax.contrib.lab.running import Result

LONGEST_REASON = 60
"""Characters of a reason in the table of predictions; a longer one becomes a note below."""


def shown(value: Any) -> str:
    """A number to four significant digits; anything else as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def page(result: "Result") -> str:
    """The page in Markdown.

    Args:
      result: what `run` returned.

    Examples:
      >>> from qjax.contrib.lab import Measurement, Prediction, Settings, Study, page, run
      >>> study = Study(
      ...     "coin",
      ...     "A coin",
      ...     "How often do heads come up?",
      ...     "One throw.",
      ...     predict=lambda settings: [Prediction("heads", 0, 1, "a share")],
      ...     measure=lambda settings: Measurement({"heads": 1.0}, [], {}, "It was heads."),
      ...     draw=lambda figure, data: None,
      ... )
      >>> page(run(study, Settings())).splitlines()[0]
      '# A coin'
    """
    return "\n".join(_lines(result)) + "\n"


def _lines(result: "Result") -> Iterator[str]:
    study, measurement = result.study, result.measurement
    yield f"# {study.title}"
    yield f"\n{study.question}\n"
    if study.answer:
        yield f"## What to do\n\n{study.answer}\n"
    yield f"![{study.title}]({study.name}.png)\n"
    if study.command:
        flags = " --full" if result.settings.full else ""
        flags += f" --seed {result.settings.seed}" if result.settings.seed else ""
        yield f"```sh\n{study.command}{flags}\n```\n"
    yield f"## What was measured\n\n{measurement.conclusion}\n"
    yield f"## Method\n\n{study.method}\n"
    yield "## Predicted, then measured\n"
    notes: list[str] = []
    rows = [
        (p.name, shown(p.low), shown(p.high), shown(measurement.values[p.name]), _verdict(p not in result.left), why)
        for p in result.predictions
        for why in [_reason(p.why, notes)]
    ]
    yield from _table(("what", "low", "high", "measured", "", "why"), rows)
    yield ""
    if notes:
        yield from _table(("note", "reason"), [(str(number), note) for number, note in enumerate(notes, 1)])
        yield ""
    for table in measurement.tables:
        yield f"## {table.title}\n"
        yield from _table(table.columns, [[shown(cell) for cell in row] for row in table.rows])
        yield ""
    made = machine()
    yield (
        f"Made in {result.seconds:.0f} s with seed {result.settings.seed}, on {made['cpu']}, {made['cores']} cores, "
        "jax "
        f"{made['jax']}. The figures behind it are in `{study.name}.json`."
    )


def _reason(why: str, notes: list[str]) -> str:
    """A short reason unchanged; for a long one, the number of a note below the table."""
    if len(why) <= LONGEST_REASON:
        return why
    if why not in notes:
        notes.append(why)
    return f"note {notes.index(why) + 1}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**outside**"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
