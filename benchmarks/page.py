"""The tables of a run onto a page, between its marks, and one picture of all ratios beside it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.timing import Paired
from experiments.machine import machine

mpl.use("Agg")  # draws to files; works without a display

from matplotlib import pyplot as plt

BLUE, ORANGE = "#3b6ea5", "#d08a2e"


def write(path: Path, timed: Mapping[str, Sequence[Paired]]) -> None:
    """Each part's table goes between `<!-- part -->` and `<!-- end part -->`; the picture is figures/PART.png.

    Raises:
      ValueError: the page has no such marks.
    """
    page = path.read_text(encoding="utf-8")
    for part, results in timed.items():
        text = f"{_table(results)}\n{_where()}\n\n![{part}](figures/{part}.png)\n"
        mark = rf"(?<=<!-- {part} -->\n).*?(?=<!-- end {part} -->)"
        page, found = re.subn(mark, lambda _, text=text: text, page, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{path}: expected one block <!-- {part} --> ... <!-- end {part} -->, found {found}.")
        _picture(path.parent / "figures" / f"{part}.png", results)
    path.write_text(page, encoding="utf-8")


def _table(results: Sequence[Paired]) -> str:
    head = "| comparison | ms | reference, ms | ratio | quartiles |\n| --- | --: | --: | --: | --: |\n"
    return head + "".join(f"| {' | '.join(result.row())} |\n" for result in results)


def _where() -> str:
    where = machine()
    versions = f"Python {where['python']}, jax {where['jax']}, flax {where['flax']}"
    return f"{where['cpu']}, {where['cores']} cores; {versions}."


def _picture(path: Path, results: Sequence[Paired]) -> None:
    ratios = np.array([result.ratio for result in results])
    ends = np.array([result.quartiles for result in results])
    figure, axes = plt.subplots(figsize=(11, 1 + 0.24 * len(results)), layout="constrained")
    places = np.arange(len(results))[::-1]
    axes.barh(places, ratios, color=[BLUE if ratio <= 1 else ORANGE for ratio in ratios], height=0.7)
    axes.hlines(places, ends[:, 0], ends[:, 1], color="black", linewidth=1)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="time / time of the reference; the line is the middle half of the pairs")
    axes.set_yticks(places, [result.name for result in results], fontsize=7)
    axes.margins(y=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
