"""Transformers in LiteRT: `python -m experiments.litert` converts, emits, runs and reads back small networks.

Each network is quantized for a target, converted and written as a .tflite file. The file's codes in LiteRT are compared
with the graph's, and so are those of the graph that `qjax.read` makes of the file, and `qjax.exact`'s outputs. Weights
and data are random. The networks are those of `experiments.models`, and Flax models of transformers 4 (two layers).
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from conformance.runtimes.litert import RESOLVERS
from experiments.architectures import arguments, batches, build
from experiments.public import hub

OWN = ("MLP-Mixer", "ViT", "BERT", "GPT, tied")
PUBLIC = ("RoBERTa", "GPT-2")
"""Of `experiments.public.hub`."""
MODES = {"tflite_reference": "reference", "tflite_optimized_x86": "optimized", "tflite_xnnpack": "xnnpack"}
"""By target, which of LiteRT's sets of kernels it is."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One network under one target: how many codes were compared, and how many differ."""

    network: str
    target: str
    operators: int
    compared: int
    litert: int
    read: int
    exact: int | None

    def cells(self) -> list[str]:
        """As the table shows it."""
        exact = "" if self.exact is None else str(self.exact)
        return [self.network, self.target, *map(str, (self.operators, self.compared, self.litert, self.read)), exact]


HEADER = ["network", "target", "operators", "codes", "LiteRT differs", "read back differs", "exact differs"]


def model_of(name: str) -> tuple[nnx.Module, Any]:
    """A network and one batch."""
    if name in OWN:
        return build(name)
    public = hub.source()[name]()
    return public.model(), public.sample


def rows(name: str, targets: Sequence[str], *, exact: bool) -> list[Row]:
    """The network under each target."""
    model, sample = model_of(name)
    found: list[Row] = []
    for target in targets:
        qmodel = qjax.quantize(model, qjax.Recipe(target=target), sample)
        qjax.calibrate(qmodel, list(batches(sample, 2)))
        qmodel.eval()
        graph = qjax.convert(qmodel, sample)
        inputs = graph.quantize(*arguments(sample))
        codes = [np.asarray(x) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]
        expected = _flat(graph.run(*codes))
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.tflite")
            graph.emit("tflite", path, batch=codes[0].shape[0])
            outputs, operators = _run(path, codes, target)
            read = _flat(qjax.read(path).run(*codes))
        differ = None
        if exact:
            forward = jax.jit(qjax.exact(qmodel, sample))
            differ = _different(_flat(forward(qmodel, *arguments(sample))), _flat(graph(*arguments(sample))))
        compared = sum(x.size for x in expected)
        row = Row(name, target, operators, compared, _different(outputs, expected), _different(read, expected), differ)
        found.append(row)
    return found


def _flat(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(outputs)]


def _different(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> int:
    return sum(int(np.sum(x != y)) for x, y in zip(a, b, strict=True))


def _run(path: str, codes: Sequence[np.ndarray], target: str) -> tuple[list[np.ndarray], int]:
    """The outputs of the file in LiteRT, and how many operators it has."""
    from ai_edge_litert import interpreter as litert
    from ai_edge_litert import schema_py_generated as schema

    kind = getattr(litert.OpResolverType, RESOLVERS[MODES[target]])
    made = litert.Interpreter(model_path=path, experimental_op_resolver_type=kind, num_threads=1)
    made.allocate_tensors()
    for details, x in zip(made.get_input_details(), codes, strict=True):
        made.set_tensor(details["index"], x)
    made.invoke()
    outputs = [np.array(made.get_tensor(details["index"])) for details in made.get_output_details()]
    graph: Any = schema.Model.GetRootAs(Path(path).read_bytes(), 0).Subgraphs(0)
    return outputs, graph.OperatorsLength()


def accuracy(shape: tuple[int, ...] = (64, 16, 64)) -> list[list[str]]:
    """Per norm and bits: decibels of the graph against the float norm of the same codes, under LiteRT and exact.

    Rows have different means and variances, from a normal and a log-normal distribution.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape) * jax.numpy.exp(jax.random.normal(keys[1], (*shape[:2], 1)) / 2)
    x = x + 0.3 * jax.random.normal(keys[2], (*shape[:2], 1))
    found: list[list[str]] = []
    for norm in (nnx.LayerNorm, nnx.RMSNorm):
        for bits in (8, 16):
            model = norm(shape[-1], rngs=nnx.Rngs(0))
            recipe = qjax.Recipe(activations=qjax.QSpec(bits, symmetric=bits == 16), target="tflite_reference")
            qmodel = qjax.quantize(model, recipe, x)
            qmodel.eval()
            cells: list[str] = []
            for target in ("tflite_reference", "nearest_even"):
                graph = qjax.convert(qmodel, x, target=target)
                held = graph.ir.tensors[graph.ir.inputs[0]].quantization
                assert held is not None
                codes = np.asarray(graph.quantize(x)).astype(np.float32)
                wanted = np.asarray(model((codes - np.asarray(held.zero_point)) * np.asarray(held.scale)), np.float64)
                noise = np.square(np.asarray(graph(x), np.float64) - wanted).sum()
                cells.append(f"{10 * np.log10(np.square(wanted).sum() / noise):.1f}")
            found.append([norm.__name__, str(bits), *cells])
    return found


def table(header: Sequence[str], found: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown, line by line."""
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header), flush=True)
    for cells in found:
        print("| " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    command = argparse.ArgumentParser(prog="python -m experiments.litert", description=__doc__)
    command.add_argument("--networks", nargs="+", default=[*OWN, *PUBLIC], metavar="NAME")
    command.add_argument("--targets", nargs="+", default=["tflite_xnnpack", "tflite_reference"], choices=MODES)
    command.add_argument("--no-exact", action="store_true", help="do not compile `qjax.exact`, which takes longest")
    command.add_argument("--accuracy", action="store_true", help="only the accuracy of norms, in decibels")
    options = command.parse_args(argv)
    if options.accuracy:
        table(["norm", "bits", "LiteRT, dB", "one rounding, dB"], accuracy())
        return []
    found: list[Row] = []

    def cells() -> Iterator[list[str]]:
        for name in options.networks:
            for row in rows(name, options.targets, exact=not options.no_exact):
                found.append(row)
                yield row.cells()

    table(HEADER, cells())
    if any(row.litert or row.read or row.exact for row in found):
        raise SystemExit("Some codes differ.")
    return found


if __name__ == "__main__":
    main()
