"""Draws pictures with matplotlib, which is imported only when a picture is asked for."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qjax.export import files

BLUE, ORANGE, GREY = "#3b6ea5", "#d08a2e", "#8a8a8a"


def draw(path: files.StrPath, size: tuple[float, float], plot: Callable[[Any], None]) -> None:
    """Write what `plot` draws on a matplotlib figure, in the format of the path's ending; never a partial file."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: expected matplotlib, which is not installed: pip install matplotlib.") from error
    figure = Figure(figsize=size, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    kind = Path(os.fspath(path)).suffix.lstrip(".").lower()
    if kind not in known:
        raise ValueError(f"plot: expected a path that ends in one of {', '.join(sorted(known))}, got {path!s}.")
    plot(figure)
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "qjax"}):
        figure.savefig(data, format=kind, dpi=100)
    files.write(data.getvalue(), path)
