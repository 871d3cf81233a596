"""A study's page: question, method, predictions beside what was measured, tables, picture, conclusion."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.machine import machine

if TYPE_CHECKING:
    from experiments.lab.run import Result


def shown(value: Any) -> str:
    """A number to four significant digits; anything else as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def page(result: "Result") -> str:
    """The page in Markdown."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: "Result") -> Iterator[str]:
    study, measurement = result.study, result.measurement
    yield f"# {study.title}"
    yield f"\n{study.question}\n"
    flags = " --full" if result.settings.full else ""
    flags += f" --seed {result.settings.seed}" if result.settings.seed else ""
    yield f"```sh\npython -m experiments {study.name}{flags}\n```\n"
    yield f"## Method\n\n{study.method}\n"
    yield "## Predicted, then measured\n"
    rows = [
        (p.name, shown(p.low), shown(p.high), shown(measurement.values[p.name]), _verdict(p not in result.left), p.why)
        for p in result.predictions
    ]
    yield from _table(("what", "low", "high", "measured", "", "why"), rows)
    yield f"\n![{study.title}]({study.name}.png)\n"
    for table in measurement.tables:
        yield f"## {table.title}\n"
        yield from _table(table.columns, [[shown(cell) for cell in row] for row in table.rows])
        yield ""
    yield f"## Conclusion\n\n{measurement.conclusion}\n"
    made = machine()
    yield (
        f"Made in {result.seconds:.0f} s with seed {result.settings.seed}, on {made['cpu']}, {made['cores']} cores, "
        "jax "
        f"{made['jax']}. The figures behind it are in `{study.name}.json`."
    )


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**left**"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
