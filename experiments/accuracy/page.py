"""The rows as tables: means over seeds, and paired differences to the float model."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.accuracy.methods import SETTINGS
from experiments.accuracy.picture import draw
from experiments.accuracy.row import Row
from qjax.export import files

PAGE = """# How accurate are networks after quantized training?

Give few bits only to the operands of products, `Recipe(other_bits=8, first_last_bits=8)`, and train for ten epochs from
the float weights. The table shows how far the best integer graph then is from the float network, in percentage points,
and which method produced it. Only the methods with the largest number of seeds are compared.

{answer}

{seeds}

![Points against float by bits]({picture})

## What to do

1. Calibrate, and stop if that is good enough.
2. Train with [`qjax.training.optimizer`](how-to/train.md) from the float weights.
3. At 4 bits and fewer set `other_bits=8`, so that only products have few bits and everything between them has 8.
4. Keep the first and the last layer at 8 bits with `first_last_bits=8`.
5. At 4 bits and fewer [distill](how-to/train.md#distillation) from the float network.

## Tables

`make accuracy ARGS="--rows experiments/results/accuracy.jsonl --page docs/accuracy-trained.md"` makes this page. It
first computes the rows that the file lacks, unless you pass `--known`. `--networks`, `--methods`, `--settings` and
`--seeds` choose rows. The tables below list the seconds of each row.

Fashion-MNIST has 60,000 training images and 10,000 test images. Every method starts from the same trained float
network, with the same data, order of batches, epochs and batch size. Results are those of the last epoch, so nothing is
selected on the test images.

- A cell is the accuracy minus the float network's, in percentage points. With several seeds it is the mean with its
  standard error.
- If the method produces an integer graph, the cell is the result of that graph.
- The first and the last layer have 8 bits. Weights of 2 bits are ternary.
- "LSQ" gives every tensor the setting's bits. "Others 8 bits" is `other_bits=8`, which gives the setting's bits only to
  the inputs and weights of convolutions and dense layers.
- "Distilled" takes half of its loss from the labels and half from the float network's probabilities.
- Brevitas and qwix quantize only tensors that a layer reads. Brevitas produces no integer graph here.
- "float, trained on" is the control, which trains the float network for as many further epochs.
- Machines sum floats in different orders, so the float network of a seed differs between them. Points are relative to
  the float network of the same machine.
- If a network has two tables, the first shows a long training of a few methods, and the second a short training of all
  methods (`--epochs 2`).

{tables}
## Details

- **graph**: points of the integer graph.
- **decisions**: number of test images that the graph and the trained model classify differently, for the worst seed.
- **seconds**: duration of the quantized training and the test. They are not comparable, because some machines did other
  work at the same time.

{details}
{machines}
"""


def _mean(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):+.2f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.2f}"


def shown(row: Row) -> float | None:
    """The points of what ships: the graph's, where there is one."""
    return row.points if row.graph_points is None else row.graph_points


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.network == name]


def _names(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(row, field)) for row in rows))


def settings_of(rows: Sequence[Row]) -> list[str]:
    """Those of the rows, from many bits to few."""
    found = {row.setting for row in rows}
    return [name for name in SETTINGS if name in found]


def longest(rows: Sequence[Row]) -> list[Row]:
    """The rows of each network's longest training, and those without training."""
    most = {name: max(row.epochs for row in _of(rows, name)) for name in _names(rows, "network")}
    return [row for row in rows if row.epochs in (0, most[row.network])]


def _summary(rows: Sequence[Row]) -> list[str]:
    """Methods by settings."""
    settings = settings_of(rows)
    lines = ["| | " + " | ".join(settings) + " |", "| --- |" + " ---: |" * len(settings)]
    for method in _names(rows, "method"):
        mine = [row for row in rows if row.method == method and row.setting != "float"]
        cells = [[p for p in map(shown, (r for r in mine if r.setting == s)) if p is not None] for s in settings]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(_mean(cell) if cell else "" for cell in cells) + " |")
    return lines


def _details(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| | epochs | points | graph | decisions | seeds | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in dict.fromkeys((row.method, row.epochs) for row in rows):
        mine = [row for row in rows if (row.method, row.epochs) == key]
        failed = [row for row in mine if row.error]
        if failed:
            lines.append(f"| {key[0]} | {key[1]} | {failed[0].error} | | | | |")
            continue
        points = [row.points for row in mine if row.points is not None]
        graphs = [row.graph_points for row in mine if row.graph_points is not None]
        decisions = [row.decisions for row in mine if row.decisions is not None]
        seconds = [row.seconds for row in mine if row.seconds is not None]
        cells = [key[0], str(key[1]), _mean(points), _mean(graphs) if graphs else "", str(max(decisions, default=""))]
        lines.append("| " + " | ".join([*cells, str(len(mine)), f"{np.mean(seconds):.0f}" if seconds else ""]) + " |")
    return lines


def _summaries(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for network in _names(rows, "network"):
        mine = _of(rows, network)
        long = longest(mine)
        lines += [f"### {network}", "", f"{_floats(long)}{_control(long)}", "", *_summary(long), ""]
        for epochs in sorted({row.epochs for row in mine} - {row.epochs for row in long}, reverse=True):
            short = [row for row in mine if row.epochs == epochs]
            lines += [f"After {epochs} epochs. {_floats(short)}{_control(short)}", "", *_summary(short), ""]
    return "\n".join(lines)


def _floats(rows: Sequence[Row]) -> str:
    """Sentences with the float networks' accuracies by seed; what another machine had comes last."""
    seeds: dict[int, list[float]] = {}
    for row in rows:
        found = seeds.setdefault(row.seed, [])
        if row.float_accuracy is not None and row.float_accuracy not in found:
            found.append(row.float_accuracy)
    usual = ", ".join(f"{found[0]:.2f}" for _, found in sorted(seeds.items()) if found)
    others = [f"{value:.2f}" for _, found in sorted(seeds.items()) for value in found[1:]]
    return f"Float: {usual} %." + (f" On another machine: {', '.join(others)} %." if others else "")


def _control(rows: Sequence[Row]) -> str:
    """What the float network gains by as many epochs."""
    control = [row.points for row in rows if row.method == "float, trained on" and row.points is not None]
    return f" Float, trained on: {_mean(control)} points." if control else ""


def text(rows: Sequence[Row]) -> str:
    """Tables by network and setting."""
    lines: list[str] = []
    for network in _names(rows, "network"):
        mine = _of(rows, network)
        for setting in settings_of(mine):
            lines += [f"### {network}, {setting}", "", *_details([r for r in mine if r.setting == setting]), ""]
    return "\n".join(lines)


def _answer(rows: Sequence[Row]) -> str:
    """What a practitioner asks first, from the rows: the best graph of every setting."""
    networks = _names(rows, "network")
    lines = ["| | " + " | ".join(networks) + " |", "| --- |" + " --- |" * len(networks)]
    rows = longest(rows)
    for setting in settings_of([row for row in rows if row.epochs]):
        cells: list[str] = []
        for network in networks:
            by_method: dict[str, list[float]] = {}
            for row in _of(rows, network):
                if row.setting == setting and row.epochs and row.graph_points is not None:
                    by_method.setdefault(row.method, []).append(row.graph_points)
            # one seed of a method does not beat several of another
            most = max(map(len, by_method.values()), default=0)
            full = [name for name, points in by_method.items() if len(points) == most]
            best = max(full, key=lambda name: float(np.mean(by_method[name])), default="")
            cells.append(f"{np.mean(by_method[best]):+.2f} ({best})" if best else "")
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _machines(rows: Sequence[Row]) -> str:
    """What made most rows; and what made others, with their names."""
    counts = Counter(row.made for row in rows if row.made)
    if not counts:
        return ""
    (usual, _), *others = counts.most_common()
    long = longest(rows)
    lines = [usual] if not others else [usual, "", "| other rows | made on |", "| --- | --- |"]
    for made, _ in others:
        names = dict.fromkeys(
            f"{row.network} {row.setting} ({row.method}{'' if row in long else f', {row.epochs} epochs'})"
            for row in rows
            if row.made == made
        )
        lines.append(f"| {', '.join(names)} | {made.removeprefix('Made on ').removesuffix('.')} |")
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row]) -> None:
    """The page and its picture, each all or nothing."""
    picture = path.parent / "figures" / f"{path.stem}.png"
    draw(longest(rows), settings_of(rows), shown, picture)
    seeds = {name: len({row.seed for row in _of(rows, name)}) for name in _names(rows, "network")}
    single = [name for name, count in seeds.items() if count == 1]
    few = "For networks with one seed, differences of a few tenths of a point mean little: "
    parts = {
        "seeds": f"{few}{', '.join(single)}." if single else "",
        "tables": _summaries(rows),
        "details": text(rows),
        "machines": _machines(rows),
    }
    whole = PAGE.format(answer=_answer(rows), picture=f"figures/{picture.name}", **parts)
    files.write(whole.encode(), path)
