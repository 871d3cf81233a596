"""A linear layer that is not monotonic: `python -m experiments.forum.fbgemm_pairs`.

All inputs of a linear layer without bias hold one value, which runs from -4 to 4. Each output is a multiple of that
value, so it can only rise or only fall. Under FBGEMM without VNNI some outputs turn: vpmaddubsw adds two products in
int16, with saturation. The graph that qjax converts for that engine turns at the same codes.
"""

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import qjax
from conformance.case import Case, Grid
from conformance.runtimes.torch_cpu import TorchCpu

INPUTS, OUTPUTS, SEED = 8, 10, 1
VALUES = np.arange(-4, 4, 0.01).astype(np.float32)
SHOWN = 9
"""The output that is explained and drawn: it turns twice."""
INT16 = (-(2**15), 2**15 - 1)


class Net(nnx.Module):
    """The linear layer, with weights drawn as PyTorch draws them."""

    def __init__(self) -> None:
        bound = 1 / np.sqrt(INPUTS)
        kernel = np.random.default_rng(SEED).uniform(-1, 1, (INPUTS, OUTPUTS)) * bound
        self.fc = nnx.Linear(INPUTS, OUTPUTS, use_bias=False, rngs=nnx.Rngs(0))
        self.fc.kernel[...] = jnp.asarray(kernel, jnp.float32)

    def __call__(self, x: Any) -> Any:
        return self.fc(x)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to run the layer."""

    name: str
    target: str
    engine: Any
    reduce_range: bool = False


SETUPS = (
    Setup("fbgemm, 8 bits", "torch_fbgemm_avx2", "fbgemm"),
    Setup("fbgemm, reduce_range", "torch_fbgemm_avx2", "fbgemm", reduce_range=True),
    Setup("qnnpack", "torch_qnnpack", "qnnpack"),
)


def convert(setup: Setup) -> qjax.IntegerGraph:
    """The post's model: uint8 activations, int8 weights, one scale each, grids from 100 normal inputs."""
    recipe = qjax.Recipe(
        target=setup.target,
        weights=qjax.QSpec(bits=8),
        activations=qjax.QSpec(bits=8, signed=False, symmetric=False),
        reduce_range=setup.reduce_range,
    )
    x = np.random.default_rng(SEED + 1).standard_normal((100, INPUTS)).astype(np.float32)
    qmodel = qjax.quantize(Net(), recipe, x)
    qmodel.eval()
    return qjax.convert(qmodel, x)


def sweep() -> np.ndarray:
    return np.repeat(VALUES[:, None], INPUTS, axis=1)


def grid_of(graph: qjax.IntegerGraph, name: str) -> Grid:
    tensor = graph.ir.tensors[name]
    assert tensor.quantization is not None
    scale = np.asarray(tensor.quantization.scale, np.float32)
    return Grid(scale, int(tensor.quantization.zero_point), tensor.dtype)


def kernel_of(graph: qjax.IntegerGraph) -> np.ndarray:
    return np.asarray(graph.ir.tensors["fc/kernel"].value)


def living(graph: qjax.IntegerGraph, setup: Setup, codes: np.ndarray) -> tuple[str, np.ndarray]:
    """The same codes through PyTorch's kernel, held to AVX2; ImportError without PyTorch."""
    runtime = TorchCpu(setup.engine, "avx2")
    case = Case(
        "fully_connected",
        (codes,),
        (grid_of(graph, "input"),),
        grid_of(graph, "fc"),
        kernel=kernel_of(graph),
        kernel_grid=grid_of(graph, "fc/kernel"),
    )
    # the kernel clamps to uint8, the graph to the 7 bits that reduce_range leaves
    quantization = graph.ir.tensors["fc"].quantization
    assert quantization is not None
    return runtime.version(), np.clip(runtime.run(case), quantization.qmin, quantization.qmax)


def turns(y: np.ndarray) -> list[int]:
    """How often each column changes between rising and falling."""
    found = []
    for column in y.T.astype(np.int64):
        steps = np.sign(np.diff(column))
        steps = steps[steps != 0]
        found.append(int(np.sum(steps[1:] != steps[:-1])))
    return found


def pairs_of(column: np.ndarray) -> list[tuple[int, int, int | None]]:
    """(w, w', the least code x of the input with x (w + w') outside of int16, None if there is none up to 255)."""
    found = []
    for first, second in column.astype(np.int64).reshape(-1, 2).tolist():
        beyond = (x for x in range(256) if not INT16[0] <= x * (first + second) <= INT16[1])
        found.append((first, second, next(beyond, None)))
    return found


def turns_of_weights(column: np.ndarray, codes: np.ndarray) -> int:
    """The sign changes of the accumulator's slope over the codes that occur, from the weights alone.

    At input code x the slope is the sum of w + w' over the pairs that are not saturated yet.
    """
    slopes = []
    for x in range(int(codes.min()), int(codes.max())):
        slope = sum(w + v for w, v, last in pairs_of(column) if last is None or x + 1 < last)
        slopes.append(np.sign(slope))
    kept = [slope for slope in slopes if slope != 0]
    return sum(a != b for a, b in itertools.pairwise(kept))


def explanation(graph: qjax.IntegerGraph, codes: np.ndarray) -> Table:
    table = Table(title=f"Output {SHOWN}: with all inputs x, a pair adds x (w + w') within int16")
    for name in ("w", "w'", "w + w'", "saturates from x", "that is from", "slope behind it"):
        table.add_column(name, justify="right")
    grid, rows = grid_of(graph, "input"), pairs_of(kernel_of(graph)[:, SHOWN])
    for w, v, last in sorted(rows, key=lambda row: 256 if row[2] is None else row[2]):
        slope = sum(a + b for a, b, other in rows if other is None or (last is not None and other > last))
        start = "never" if last is None else str(last)
        real = "" if last is None else f"{(last - grid.zero_point) * float(grid.scale):+.2f}"
        table.add_row(str(w), str(v), str(w + v), start, real, "" if last is None else f"{slope:+d}")
    table.caption = (
        f"slope before: {sum(w + v for w, v, _ in rows):+d}; codes of the sweep: {codes.min()}..{codes.max()}"
    )
    return table


def picture(path: Path, curves: dict[str, np.ndarray]) -> None:
    """The explained output under every setup, and the real product."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    real = np.asarray(Net()(jnp.asarray(sweep())))[:, SHOWN]
    figure, axes = plt.subplots(1, len(curves), figsize=(10, 3), sharey=True, layout="constrained")
    for panel, (name, curve) in zip(axes, curves.items(), strict=True):
        panel.plot(VALUES, real, color="#8a8a8a", linewidth=0.8, label="real numbers")
        panel.plot(VALUES, curve[:, SHOWN], color="#3b6ea5", label="codes, dequantized")
        panel.set(title=name, xlabel="value of every input")
    axes[0].set_ylabel(f"output {SHOWN}")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.fbgemm_pairs", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for PyTorch")
    parser.add_argument("--figure", type=Path, help="write the picture of one output to this file")
    args = parser.parse_args(argv)
    console, x = Console(width=120), sweep()

    table = Table(title=f"{OUTPUTS} outputs of {INPUTS} equal inputs, {len(VALUES)} values from -4 to 4")
    for name in ("engine", "turns of each output", "pairs at risk", "pairs cut", "qjax differs"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    graphs, curves, turned, at_risk = {}, {}, {}, {}
    version, mismatches = "", 0
    for setup in SETUPS:
        graph = graphs[setup.name] = convert(setup)
        codes = np.asarray(graph.quantize(x))
        y = np.asarray(graph.run(codes))
        theirs = None
        if not args.emulate:
            try:
                version, theirs = living(graph, setup, codes)
                mismatches += int(np.sum(theirs != y))
            except ImportError:
                args.emulate = True
        curves[setup.name] = np.asarray(graph.dequantize(y))
        turned[setup.name] = turns(y)
        # what data does to pairs is asked where something can happen
        (node,) = qjax.accumulators(graph).nodes
        saturated = "exact sums"
        if setup.engine == "fbgemm":
            seen = qjax.accumulators(graph, [x]).nodes[0].observed if node.pairs_at_risk else None
            saturated = "0" if seen is None else f"{seen.pairs_saturated:,} of {seen.pairs:,}"
        at_risk[setup.name] = node.pairs_at_risk
        table.add_row(
            setup.name,
            " ".join(map(str, turned[setup.name])),
            f"{node.pairs_at_risk} of {node.weight_pairs}",
            saturated,
            "not installed" if theirs is None else f"{np.sum(theirs != y):,} of {y.size:,}",
        )
    console.print(table)
    wide, narrow, exact = (setup.name for setup in SETUPS)
    codes = np.asarray(graphs[wide].quantize(x))
    console.print(explanation(graphs[wide], codes))
    console.print(
        f"PyTorch: {version}, FBGEMM_ENABLE_INSTRUCTIONS=AVX2." if version else "No PyTorch: codes are qjax's."
    )
    if args.figure is not None:
        picture(args.figure, curves)
        console.print(f"wrote {args.figure}")

    expected = [turns_of_weights(column, codes) for column in kernel_of(graphs[wide]).T]
    claims = {
        **({"qjax's graphs give PyTorch's codes": mismatches == 0} if version else {}),
        "under FBGEMM without VNNI some outputs are not monotonic": any(turned[wide]),
        "they turn as often as saturated pairs change the sign of the slope": turned[wide] == expected,
        "with reduce_range no pair can saturate, and every output is monotonic": not any(turned[narrow])
        and at_risk[narrow] == 0,
        "qnnpack's outputs are monotonic": not any(turned[exact]),
    }
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
