"""What a run found onto the pages of a folder: a part's text between its marks, a picture beside it."""

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.timing import Paired, Result

mpl.use("Agg")  # draws to files; works without a display

from matplotlib import pyplot as plt

BLUE, ORANGE = "#3b6ea5", "#d08a2e"

ARTIFACTS = "artifacts"
"""The part with a page of its own; those of all others are sections of benchmarks.md."""


def check(docs: Path, parts: Sequence[str]) -> None:
    """Whether every part has a place.

    Raises:
      ValueError: a page is missing, or a part has no block `<!-- part -->` ... `<!-- end part -->` on it, or several.
    """
    for part in parts:
        path = _page(docs, part)
        if not path.is_file():
            raise ValueError(f"expected the page {path} for the results of {part!r}; there is no such file.")
        found = len(re.findall(_mark(part), path.read_text(encoding="utf-8"), flags=re.DOTALL))
        if found != 1:
            raise ValueError(f"{path}: expected one block <!-- {part} --> ... <!-- end {part} -->, found {found}.")


def put(docs: Path, part: str, text: str) -> None:
    """A part's text in the place of the former one."""
    check(docs, [part])
    path = _page(docs, part)
    page = re.sub(_mark(part), lambda _: text, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    path.write_text(page, encoding="utf-8")


def picture_of(docs: Path, part: str) -> Path:
    """Where a part's picture is; `![](figures/PART.png)` shows it."""
    return docs / "figures" / f"{part}.png"


def _page(docs: Path, part: str) -> Path:
    return docs / ("artifacts.md" if part == ARTIFACTS else "benchmarks.md")


def _mark(part: str) -> str:
    return rf"(?<=<!-- {part} -->\n).*?(?=<!-- end {part} -->)"


def draw_ratios(path: Path, results: Sequence[Result]) -> None:
    """A bar for each ratio."""
    drawn = [result for result in results if isinstance(result, Paired)]
    ratios = np.array([result.ratio for result in drawn])
    ends = np.array([result.quartiles for result in drawn]).reshape(-1, 2)
    figure, axes = plt.subplots(figsize=(11, 1 + 0.24 * len(drawn)), layout="constrained")
    places = np.arange(len(drawn))[::-1]
    axes.barh(places, ratios, color=[BLUE if ratio <= 1 else ORANGE for ratio in ratios], height=0.7)
    axes.hlines(places, ends[:, 0], ends[:, 1], color="black", linewidth=1)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="time / time of the reference; the line is the middle half of the pairs")
    axes.set_yticks(places, [result.name for result in drawn], fontsize=7)
    axes.margins(y=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
