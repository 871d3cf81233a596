"""The rows as a page for docs/."""

from collections.abc import Sequence
from pathlib import Path

from experiments.cost.cases import CASES
from experiments.cost.groups import COMPARED, REFERENCE, Row
from qjax.contrib.lab.machine import made_on
from qjax.export import files

PAGE = """# What does each runtime's rounding cost?

The same quantized network computes other codes in every runtime, because runtimes round differently. How many
decisions change, and does accuracy fall?

## What to do

Convert for the runtime that you ship to, so that there is no difference to explain. With 8 bits another rounding may
change most output codes of a network, but few decisions. Close decisions change first, such as the nearest of many
sentences. Look at your own network with [`qjax.compare`](compare.md) before you search for a fault in training.

With 4 bits in every tensor the same is true of convolutional networks. A transformer, however, loses accuracy under
targets that write its norms as several operations (all `tflite_*` except `tflite_micro`).

With 2 bits in every tensor the runtime decides about accuracy, because a step of the accumulator is then as wide as a
step of the output. Gemmlowp's two roundings (TFLite Micro, CMSIS-NN) therefore change codes everywhere, and all
runtimes except PyTorch and OpenVINO round biases to such wide steps. Training reproduces the bias of the recipe's
target, but not its second rounding. Use `Recipe(other_bits=8)`, or let the last epochs run through
[`qjax.exact`](how-to/train.md).

{worst}

`make weights && python -m experiments.cost --rows experiments/results/cost.jsonl --page docs/rounding-cost.md` writes
this page. The command computes the rows that the file lacks, unless you pass `--known`.

## Summary

Each cell is the most decisions that any target changes, in percent, and the range of the task's measure over all
targets. Targets whose sums of pairs saturate (`*_avx2`) are left out here and listed in the tables below.

{summary}

{missing}

## Targets

{targets}

## Method

Every network is quantized once for each setting, and its integer graph then runs under every target on the same
inputs. `{reference}` rounds the exact real value to the nearest code, ties to even. Every other target is compared
with it. Pretrained networks are only calibrated at W8A8, and quantized by `post_training` at fewer bits. The others are
trained with quantization, for two epochs of Fashion-MNIST or twenty of the digits, and their first and last layers have
8 bits.

| column | meaning |
| --- | --- |
| targets | those with the same outputs for all inputs |
| codes | output values that differ from those of `{reference}` |
| decisions | what a user acts on: class, face or not, pitch, speech or not, nearest sentence |
| task | the task's own measure, in percent |
| first difference | the first node that differs though its inputs agree; its operation; the share of its codes; why |
| nodes | in how many nodes differences arise, from the same inputs |

The last two columns come from `qjax.compare` on {compared} examples, beginning with those whose outputs differ. They
are empty if a target needs several nodes for one of the reference. A row without numbers lists the targets that cannot
compute the network, and the reason.

{tables}

{machine}
"""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if part else "0"


def _cells(row: Row) -> list[str]:
    names = ", ".join(f"`{name}`" for name in row.targets)
    if row.refused:
        return [names, "", "", "", row.refused.replace("|", "\\|"), ""]
    first = "" if not row.first else f"`{row.first}` ({row.op}), {100 * row.share:.2g} %: {row.cause}"
    score = "" if row.score is None else f"{row.score:.2f}"
    codes, decisions = _percent(row.codes, row.compared), f"{row.changed:,} of {row.decisions:,}"
    return [names, codes, decisions, score, first, str(row.nodes) if row.first else ""]


def table(found: Sequence[Row]) -> list[str]:
    """The rows of one network and setting."""
    head = ["targets", "codes", "decisions", "task", "first difference", "nodes"]
    lines = [head, ["---", "---:", "---:", "---:", "---", "---:"], *map(_cells, found)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _compared(row: Row) -> bool:
    return not row.refused and REFERENCE not in row.targets


def _saturates(row: Row) -> bool:
    """Whether all its targets add pairs in 16 bits."""
    return all(name.endswith("_avx2") for name in row.targets)


def _summary(found: Sequence[Row]) -> list[str]:
    settings = list(dict.fromkeys(row.setting for row in found))
    lines = ["| | " + " | ".join(settings) + " |", "| --- |" + " ---: |" * len(settings)]
    for network in dict.fromkeys(row.network for row in found):
        cells: list[str] = []
        for setting in settings:
            mine = [r for r in found if (r.network, r.setting) == (network, setting) and not r.refused]
            usual = [row for row in mine if not _saturates(row)]
            scores = [row.score for row in usual if row.score is not None]
            most = max((row.changed / row.decisions for row in usual), default=0.0)
            cells.append(f"{100 * most:.2f} / {min(scores):.2f} to {max(scores):.2f}" if scores else "")
        lines.append(f"| {network} | " + " | ".join(cells) + " |")
    return lines


def _targets(found: Sequence[Row]) -> list[str]:
    """One line a target: its worst case over all networks and settings."""
    lines = [
        "| target | networks | most decisions changed | where | most codes changed | change of task |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    even = {(row.network, row.setting): row.score for row in found if REFERENCE in row.targets}
    for name in sorted({name for row in found for name in row.targets}):
        mine = [row for row in found if name in row.targets and not row.refused]
        if not mine or name == REFERENCE:
            continue
        worst = max(mine, key=lambda row: row.changed / row.decisions)
        codes = max(row.codes / row.compared for row in mine)
        changes = [(row.score or 0.0) - (even[row.network, row.setting] or 0.0) for row in mine]
        share, where = 100 * worst.changed / worst.decisions, f"{worst.network}, {worst.setting}"
        span = f"{min(changes):+.2f} to {max(changes):+.2f}"
        where = where if worst.changed else ""
        lines.append(f"| `{name}` | {len(mine)} | {share:.2f} % | {where} | {100 * codes:.1f} % | {span} |")
    return lines


def _worst(found: Sequence[Row]) -> list[str]:
    """One line a setting: the most decisions and the greatest loss, over all networks and targets."""
    even = {(row.network, row.setting): row.score or 0.0 for row in found if REFERENCE in row.targets}
    lines = ["| setting | networks | decisions changed, at most | task, at worst |", "| --- | ---: | ---: | ---: |"]
    for setting in dict.fromkeys(row.setting for row in found):
        mine = [row for row in found if row.setting == setting and _compared(row) and not _saturates(row)]
        share = max((row.changed / row.decisions for row in mine), default=0.0)
        loss = min(((row.score or 0.0) - even[row.network, setting] for row in mine), default=0.0)
        networks = len({row.network for row in found if row.setting == setting})
        lines.append(f"| {setting} | {networks} | {100 * share:.1f} % | {loss:+.2f} points |")
    return lines


def _missing(found: Sequence[Row]) -> str:
    """What the command knows and the page has no rows of."""
    known = {(row.network, row.setting) for row in found}
    rest: dict[str, list[str]] = {}
    for network, setting in CASES:
        if (network, setting) not in known:
            rest.setdefault(network, []).append(setting)
    return "\n".join(["Not run here:", "", *(f"- {name}: {', '.join(s)}" for name, s in rest.items())]) if rest else ""


def text(found: Sequence[Row]) -> str:
    """The page."""
    parts: list[str] = []
    for key in dict.fromkeys((row.network, row.setting) for row in found):
        mine = [row for row in found if (row.network, row.setting) == key]
        parts += [f"## {key[0]}, {key[1]}", "", *table(mine), ""]
    return PAGE.format(
        worst="\n".join(_worst(found)),
        missing=_missing(found),
        summary="\n".join(_summary(found)),
        targets="\n".join(_targets(found)),
        tables="\n".join(parts).rstrip(),
        reference=REFERENCE,
        compared=COMPARED,
        machine=made_on(),
    )


def write(path: Path, found: Sequence[Row]) -> None:
    """The page, all or nothing."""
    files.write(text(found).encode(), path)
