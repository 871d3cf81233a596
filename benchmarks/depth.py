"""How first calls grow with depth: encoders of 4 to 48 equal layers, as in `first_calls`.

The figures are seconds of the processor. A line of slope one through the last point says what linear growth would be.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.first_calls import First, apart
from benchmarks.page import plt
from benchmarks.report import Grid

DEPTHS = (4, 12, 48)
CALLS = ("float step", "quantize", "quantized step", "exact step", "convert")


def depth(depths: Sequence[int] = DEPTHS, calls: Sequence[str] = CALLS) -> Iterator[tuple[int, First]]:
    """Every call at every depth, each in a process of its own."""
    for layers in depths:
        for call in calls:
            yield layers, apart(f"encoder, {layers} layers of 32", call)


def table(results: Sequence[tuple[int, First]]) -> Grid:
    """A row a call, a column a depth: seconds, and operations where a call is one program."""
    depths = sorted({layers for layers, _ in results})
    rows: list[tuple[str, ...]] = []
    for call in dict.fromkeys(first.call for _, first in results):
        found = {layers: first for layers, first in results if first.call == call}
        rows.append((f"{call}, s", *(f"{found[layers].seconds:.1f}" for layers in depths)))
        stages = [found[layers].stages for layers in depths]
        if all(stage is not None for stage in stages):
            rows.append((f"{call}, operations", *(f"{stage.operations:,}" for stage in stages if stage is not None)))
    return Grid(("first call", *(f"{layers} layers" for layers in depths)), rows)


def picture(path: Path, results: Sequence[tuple[int, First]]) -> None:
    """Seconds against layers."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for call in dict.fromkeys(first.call for _, first in results):
        found = [(layers, first.seconds) for layers, first in results if first.call == call]
        layers, seconds = zip(*found, strict=True)
        (line,) = axes.loglog(layers, seconds, marker="o", label=call)
        ideal = [seconds[-1] * n / layers[-1] for n in layers]
        axes.loglog(layers, ideal, linestyle=":", color=line.get_color(), linewidth=1)
    axes.set(xlabel="layers", ylabel="seconds of the processor; dotted: linear growth")
    axes.set_xticks(sorted({n for n, _ in results}), [str(n) for n in sorted({n for n, _ in results})])
    axes.minorticks_off()
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
