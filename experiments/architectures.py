"""Published architectures in plain Flax, all the way to integers: `python -m experiments.architectures`.

Each model of `experiments.models` is quantized, calibrated, trained for a few steps, converted, and compared: the
fake-quantized forward with the graph node by node, and the exact forward with the graph's outputs. Weights and data
are random: this is about which programs convert and with which bits, not about accuracy. Every architecture runs in a
process of its own, so that its peak memory is its own.
"""

import argparse
import dataclasses
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import qjax
from experiments.architecture_page import Row, page, table_of, write

ARCHITECTURES = {
    "ResNet-20": ("resnet", "resnet20"),
    "ResNet-18": ("resnet", "resnet18"),
    "ResNet-50": ("resnet", "resnet50"),
    "MobileNet V1": ("mobilenet", "v1"),
    "MobileNet V2": ("mobilenet", "v2"),
    "MobileNet V3": ("mobilenet", "v3"),
    "Inception V1": ("inception", "v1"),
    "Inception V3": ("inception", "v3"),
    "EfficientNet": ("efficientnet", ""),
    "ConvNeXt": ("convnext", ""),
    "U-Net": ("unet", "transpose"),
    "U-Net, resize": ("unet", "resize"),
    "ViT": ("vit", ""),
    "BERT": ("bert", ""),
    "GPT, tied": ("gpt", "tied"),
    "GPT, untied": ("gpt", "untied"),
    "MLP-Mixer": ("mixer", ""),
    "LSTM": ("recurrent", "lstm"),
    "GRU": ("recurrent", "gru"),
    "DS-CNN": ("ds_cnn", ""),
    "Autoencoder": ("autoencoder", "dense"),
    "Autoencoder, conv": ("autoencoder", "conv"),
    "Linen CNN": ("linen_cnn", ""),
    "Linen transformer": ("linen_transformer", ""),
}
"""Name -> the module under `experiments.models`, and the variant of its `small` and `full`."""

TIMEOUT = 3600


def build(name: str, *, full: bool = False, seed: int = 0) -> tuple[nnx.Module, Any]:
    """The model (a Linen module comes through `qjax.from_linen`) and one batch."""
    module, variant = ARCHITECTURES[name]
    size = "full" if full else "small"
    attribute = size if not variant else variant if full else f"{size}_{variant}"
    made = getattr(importlib.import_module(f"experiments.models.{module}"), attribute)(nnx.Rngs(seed))
    if len(made) == 2:
        return made
    linen, variables, sample = made
    modes = {"train": True}, {"train": False}
    streams = nnx.Rngs(dropout=seed)
    return qjax.from_linen(linen, variables, training=modes[0], evaluation=modes[1], rngs=streams), sample


def equations(model: nnx.Module, sample: Any) -> int:
    """How many equations the model's jaxpr has in evaluation mode; calls are opened, not counted."""
    copy = nnx.clone(model)
    copy.eval()

    def jaxprs(closed: Any) -> Any:
        return getattr(closed, "jaxpr", closed)

    def total(jaxpr: Any) -> int:
        n = 0
        for eqn in jaxpr.eqns:
            params = [p for value in eqn.params.values() for p in (value if isinstance(value, tuple) else (value,))]
            bodies = [jaxprs(p) for p in params if hasattr(jaxprs(p), "eqns")]
            n += sum(total(body) for body in bodies) if bodies else 1
        return n

    definition, state = nnx.split(copy)
    # merged inside the trace: a recurrent layer counts its random numbers there
    return total(
        jax.make_jaxpr(lambda state, *args: nnx.merge(definition, state)(*args))(state, *arguments(sample)).jaxpr
    )


def arguments(sample: Any) -> tuple[Any, ...]:
    """A batch as the arguments of the call."""
    return sample if isinstance(sample, tuple) else (sample,)


def batches(sample: Any, count: int, seed: int = 1) -> Iterator[Any]:
    """Random batches like the sample: real values from a normal distribution, integers from the sample's range.

    An integer array of zeros and ones is a mask; its rows change places.
    """

    def like(key: jax.Array, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(key, x.shape, x.dtype)
        if int(x.max()) <= 1:
            return jax.random.permutation(key, x)
        return jax.random.randint(key, x.shape, int(x.min()), int(x.max()) + 1, x.dtype)

    leaves, tree = jax.tree.flatten(sample)
    for key in jax.random.split(jax.random.key(seed), count):
        keys = jax.random.split(key, len(leaves))
        yield tree.unflatten([like(k, x) for k, x in zip(keys, leaves, strict=True)])


def train(qmodel: Any, data: list[Any], learning_rate: float = 1e-3) -> list[float]:
    """One step of Adam per batch towards random outputs; the losses."""
    optimizer = nnx.Optimizer(qmodel, optax.adam(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(qmodel: Any, optimizer: Any, args: tuple[Any, ...]) -> jax.Array:
        def loss(qmodel: Any) -> jax.Array:
            outputs = jax.tree.leaves(qmodel(*args))
            keys = jax.random.split(jax.random.key(0), len(outputs))
            wanted = [jax.random.normal(k, y.shape, y.dtype) for k, y in zip(keys, outputs, strict=True)]
            parts = [jnp.mean(jnp.square(y - w)) for y, w in zip(outputs, wanted, strict=True)]
            return jnp.stack(parts).sum()

        value, gradients = nnx.value_and_grad(loss)(qmodel)
        optimizer.update(qmodel, gradients)
        return value

    qmodel.train()
    losses = [float(step(qmodel, optimizer, arguments(batch))) for batch in data]
    qmodel.eval()
    if not np.all(np.isfinite(losses)):
        raise FloatingPointError(f"training: a loss is not finite: {losses}")
    return losses


def differing(a: Any, b: Any) -> tuple[int, int]:
    """How many numbers of two equal structures differ, of how many."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(f"expected one structure, got {jax.tree.structure(a)} and {jax.tree.structure(b)}")
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True)]
    return sum(int(np.sum(x != y)) for x, y in pairs), sum(x.size for x, _ in pairs)


def run(name: str, *, full: bool = False, steps: int = 3, count: int = 2, target: str = "nearest_even") -> Row:
    """Everything about one architecture, in this process."""
    row, stage, start = Row(name), "build", time.perf_counter()
    try:
        model, sample = build(name, full=full)
        row.parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        row.equations = equations(model, sample)
        data = list(batches(sample, steps + count))
        stage = "quantize"
        qmodel = qjax.quantize(model, qjax.Recipe(target=target), sample)
        stage = "calibrate"
        qjax.calibrate(qmodel, data[:count])
        qmodel.eval()
        if steps:
            stage = "train"
            row.losses = train(qmodel, data[count:])
        stage = "convert"
        begin = time.process_time()
        graph = qjax.convert(qmodel, sample)
        row.seconds = time.process_time() - begin
        row.nodes = len(graph.ir.nodes)
        row.float_nodes = sum(graph.ir.tensors[n.output].dtype.startswith("float") for n in graph.ir.nodes)
        stage = "verify"
        report = qjax.verify(graph, qmodel, data[:count])
        row.compared, row.mismatches, row.worst, row.report = (
            report.compared,
            report.local,
            report.local_max,
            str(report),
        )
        stage = "exact"
        forward = nnx.jit(qjax.exact(qmodel, sample))
        begin = time.process_time()
        jax.block_until_ready(forward(qmodel, *arguments(sample)))
        row.exact_seconds = time.process_time() - begin
        for batch in data[:count]:
            different, outputs = differing(forward(qmodel, *arguments(batch)), graph(*arguments(batch)))
            row.exact_mismatches += different
            row.outputs += outputs
    except Exception as error:  # the table says which stage of which architecture fails, and why
        lines = [line for line in str(error).splitlines() if line.strip()]
        row.error = f"{stage}: {type(error).__name__}: {lines[0] if lines else ''}"
        row.report = row.report or str(error)
    row.total_seconds = time.perf_counter() - start
    row.megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def run_apart(name: str, *options: str) -> Row:
    """`run` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "experiments.architectures", "--only", name, "--row", str(path), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            return Row(name, error=f"not done after {TIMEOUT} s")
        if not path.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return Row(name, error=f"the process ended with {done.returncode}: {last}")
        return Row(**json.loads(path.read_text()))


def row_file(name: str, folder: Path) -> Path:
    """Where `--rows` keeps an architecture's row."""
    return folder / f"{name.replace(' ', '_')}.json"


def known(name: str, folder: Path | None) -> Row | None:
    """The row of an earlier run, if it is there."""
    if folder is None or not row_file(name, folder).exists():
        return None
    return Row(**json.loads(row_file(name, folder).read_text()))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m experiments.architectures", description=__doc__)
    made.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(ARCHITECTURES)}")
    made.add_argument("--full", action="store_true", help="use the published sizes; takes hours and many gigabytes")
    made.add_argument("--steps", type=int, default=3, help="steps of quantization-aware training")
    made.add_argument("--batches", type=int, default=2, help="batches for calibration and for the comparison")
    made.add_argument("--target", default="nearest_even", help="the target whose rounding the integers follow")
    made.add_argument("--rows", type=Path, metavar="FOLDER", help="store every row there, and reuse stored rows")
    made.add_argument("--page", type=Path, help="write the table to this file, as Markdown")
    made.add_argument("--verbose", action="store_true", help="also print the table of every node, or the whole error")
    made.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    command = parser()
    args = command.parse_args(argv)
    names = args.only or list(ARCHITECTURES)
    for name in names:
        if name not in ARCHITECTURES:
            command.error(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    if args.row is not None:
        (name,) = names
        row = run(name, full=args.full, steps=args.steps, count=args.batches, target=args.target)
        write(args.row, json.dumps(dataclasses.asdict(row)))
        return [row]
    options = ["--steps", str(args.steps), "--batches", str(args.batches), "--target", args.target]
    options += ["--full"] if args.full else []
    console, rows = Console(width=200, highlight=False, soft_wrap=True), []
    for name in names:
        row = known(name, args.rows) or run_apart(name, *options)
        if args.rows is not None:
            write(row_file(name, args.rows), json.dumps(dataclasses.asdict(row)))
        rows.append(row)
        console.print(f"{name}: {row.error or 'ok'}, {row.total_seconds:.0f} s", markup=False)
        if args.verbose:
            console.print(row.report + "\n", markup=False)
        if args.page is not None:
            write(
                args.page, page(rows, args, [other for other in ARCHITECTURES if other not in {r.name for r in rows}])
            )
    console.print(table_of(rows))
    return rows


if __name__ == "__main__":
    sys.exit(int(any(row.error or row.float_nodes or row.exact_mismatches for row in main())))
