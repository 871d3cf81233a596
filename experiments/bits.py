"""Hashes of every artifact of many graphs: `python -m experiments.bits --write FILE`, later `--against FILE`.

They show that a change of code leaves every file as it was. The graphs are those that tests and experiments build: each
operation under each target, the networks of the emitters' tests, one network under all targets, random networks and
published architectures. `--quick` takes one graph of each arithmetic and the networks that cost least. An entry is a
hash, or the class of the error that is raised instead. Lines of source files are left out. A run fails if an
operation or a target is in no graph.
"""

import argparse
import dataclasses
import functools
import gzip
import hashlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import qjax
from experiments import architectures
from experiments.random_networks.checks import case_of
from qjax import ops, targets
from qjax.assign.retarget import retarget
from qjax.contrib import rtl
from qjax.contrib.importers.tflite import read
from qjax.export import artifact
from qjax.export.emit import c, onnx, stablehlo, tflite
from qjax.graph.ir import Graph
from qjax.support import extensions

RANDOM = 3
"""Random networks of each target."""
SLOW = {
    "images avx2",
    "sequences int8",
    "openvino residual",
    "openvino mobile",
    "qonnx images",
    "tflite images",
    "tflite sequences",
}
"""Networks that `--quick` leaves out, with all circuits but those of dense layers."""
NEVER = {"dropout", "ragged_dot"}
"""Operations of models of which no graph has a node: the conversion writes others in their place."""
STYLES: dict[str, dict[str, Any]] = {
    **{style: {"style": style} for style in extensions.ONNX_STYLES},
    **{f"{style} vnni": {"style": style, "vnni": True} for style in ("integer", "qdq")},
    **{f"portable {kind}": {"style": "qdq", "portable": kind} for kind in onnx.PORTABLE},
    "qdq codes": {"style": "qdq", "codes": True},
    "integer batch": {"style": "integer", "batch": 2},
}
PLACE = re.compile(r'^#loc.*\n| loc\((?:[^()"]|"[^"]*"|\((?:[^()]|\([^()]*\))*\))*\)', re.MULTILINE)
"""What the text of a StableHLO module says of source files."""
Make = Callable[[], Any]


def _each(prefix: str, names: Iterable[Any], make: Callable[[Any], Any]) -> dict[str, Make]:
    return {f"{prefix} {name}": functools.partial(make, name) for name in names}


def _converted(model: Any, sample: Any, recipe: qjax.Recipe, target: Any = None) -> Any:
    qmodel = qjax.quantize(model, recipe, sample)
    qmodel.eval()
    return qjax.convert(qmodel, sample, target=target)


def graphs(quick: bool) -> dict[str, Make]:
    """Name -> what makes the graph. A name of several words is that of a network."""
    names = ("every_target", "c_loops", "tflite", "tflite_dynamic_conv", "float_islands")
    every, loops, models, convs, floats = (importlib.import_module(f"tests.export.emit.test_{name}") for name in names)
    images, dots = (
        importlib.import_module(f"tests.export.emit.{name}") for name in ("onnx_networks", "dynamic_graphs")
    )
    names = ("openvino_networks", "qonnx_networks")
    openvino, qonnx = (importlib.import_module(f"tests.contrib.onnx_styles.{name}") for name in names)
    names = ("contrib.rtl.rtl_networks", "ops.test_lstm", "ops.test_svdf", "run.test_find_loops", "assign.chip")
    names += ("targets.test_every_target",)
    circuits, lstm, svdf, repeats, chip, single = (importlib.import_module(f"tests.{name}") for name in names)
    named = every.Everything().named
    nodes = {name: graph for name, (graph, _) in (every.chosen(named) if quick else named).items()}
    unsigned = {"activations": images.UNSIGNED}
    kinds = {kind.__name__: kind for kind in circuits.SHAPES}

    @functools.cache
    def network(of: str) -> Graph:
        return _converted(single.Network(of != "fpga"), single.SAMPLE, single.recipe_of(of)).ir

    def under(target: str) -> Graph:
        own = single.recipe_of(target).activations == single.UNSIGNED
        return retarget(network("fpga" if target == "fpga" else "onnxruntime" if own else "nearest_even"), target)

    def of_runtime(model: Any, data: Any, target: str = "onnxruntime", **recipe: Any) -> Make:
        return lambda: images.converted(model(), data, target=target, **recipe)

    found: dict[str, Make] = {
        **{name: functools.partial(nodes.get, name) for name in nodes},
        "images uint8": of_runtime(images.Images, images.IMAGES, **unsigned),
        "images int8": of_runtime(images.Shortcut, images.IMAGES),
        "images avx2": of_runtime(images.Images, images.IMAGES, "onnxruntime_avx2", **unsigned, reduce_range=True),
        "attention uint8": of_runtime(images.Attention, images.SEQUENCES, **unsigned),
        "attention int8": of_runtime(images.Attention, images.SEQUENCES),
        "sequences int8": of_runtime(images.Sequences, images.SEQUENCES),
        "GRU nearest": lambda: repeats.converted(repeats.Recurrent(), (2, 6, 3))[1],
        "GRU onnxruntime": lambda: repeats.converted(repeats.Recurrent(), (2, 3, 3), "onnxruntime")[1],
        "stack nearest": lambda: repeats.converted(repeats.Stack(3), (2, 4))[1],
        "dynamic dot": lambda: dots.product("tflite_xnnpack", 4, 8),
        "dynamic conv": lambda: convs.convolution((3, 3)),
        "backend conv": lambda: _converted(chip.Residual(), chip.IMAGES, qjax.Recipe(), chip.device_of()),
        **_each("loop", loops.CHAINS, loops.CHAINS.get),
        **_each("openvino", openvino.NETWORKS, lambda name: openvino.graph_of(name)[1]),
        **_each("qonnx", qonnx.NETWORKS, lambda name: qonnx.graph_of(name, "w4a4")),
        **_each("tflite", models.MODELS, models.model),
        **_each("float", floats.SETTINGS, lambda name: floats.converted(floats.SETTINGS[name], "first")),
        **_each("lstm", ("tflite_micro", "nearest_even"), lambda target: read(lstm.model(), target=target)),
        **_each("svdf", ("tflite_micro", "tflite_reference"), lambda target: read(svdf.model(), target=target)),
        **_each("rtl", kinds, lambda name: circuits.for_fpga(kinds[name])),
        **_each("network", targets.names(), under),
    }
    if quick:
        left_out = SLOW | {f"rtl {name}" for name in kinds if name not in ("Residual", "Dense")}
        return {name: make for name, make in found.items() if name not in left_out}

    def random(seed: int) -> Any:
        case = case_of(seed)
        return _converted(case.model, case.sample, case.recipe)

    found |= _each("random", range(RANDOM * len(targets.names())), random)
    published = architectures.ARCHITECTURES
    return found | _each("architecture", published, lambda name: _converted(*architectures.build(name), qjax.Recipe()))


def text(graph: Graph) -> Any:
    """All that a graph holds, with its constants' bits."""

    def bits(x: Any) -> Any:
        return None if x is None else (np.asarray(x).dtype.str, np.shape(x), np.asarray(x).tobytes())

    tensors: list[Any] = []
    for t in graph.tensors.values():
        q = t.quantization
        grid = None if q is None else (bits(q.scale), bits(q.zero_point), q.qmin, q.qmax, q.axes)
        tensors.append((t.name, t.shape, t.dtype, bits(t.value), grid))
    nodes = [(n.name, n.op, n.inputs, n.output, dict(n.constants), dict(n.attributes)) for n in graph.nodes]
    own = (graph.inputs, graph.outputs, graph.target, dict(graph.metadata), graph.quantization, graph.dequantization)
    return tensors, nodes, own, graph.quantized and text(graph.quantized)


def without_places(graph: Graph) -> Graph:
    """The graph without lines of source files."""

    def stripped(value: Any) -> Any:
        # the members of a backend's kernel are fields and values
        if isinstance(value, list | tuple):
            return ["location", None] if value[:1] == ["location"] else [stripped(part) for part in value]
        return value

    nodes = tuple(
        dataclasses.replace(node, location=None, attributes={k: stripped(v) for k, v in node.attributes.items()})
        for node in graph.nodes
    )
    return graph.replace(nodes=nodes, quantized=graph.quantized and without_places(graph.quantized))


def _module(graph: Graph) -> str:
    return jax.export.deserialize(bytearray(stablehlo.to_bytes(graph))).mlir_module()


def artifacts(graph: Graph, name: str, quick: bool) -> dict[str, Make]:
    """Format -> what makes its content. Only the networks for circuits become some, because others take minutes."""
    made: dict[str, Make] = {
        "text": lambda: text(graph),
        "qjax": lambda: artifact.to_bytes(graph),
        "tflite": lambda: tflite.to_bytes(graph),
    }
    if not (quick and name.startswith("network ")):
        made["c"] = lambda: c.to_files(graph, vectors=0 if quick else 4)
        made["stablehlo"] = lambda: PLACE.sub("", _module(graph))
    if name.startswith("rtl "):
        # a compressed file holds the time at which it was written
        made["rtl"] = lambda: {
            path: gzip.decompress(data) if path.endswith(".gz") else data for path, data in rtl.to_files(graph).items()
        }

    def emitted(style: str) -> bytes:
        return onnx.to_model(graph, **STYLES[style]).SerializeToString(deterministic=True)

    styles = {
        style: given for style, given in STYLES.items() if not quick or style not in ("integer batch", "integer vnni")
    }
    return made | _each("onnx", styles, emitted)


def entries(quick: bool) -> dict[str, str]:
    """Graph and format -> hash, or the class of the error. Raises a ValueError where not everything is covered."""
    found: dict[str, str] = {}
    known: set[str] = set()
    for count, (name, make) in enumerate(graphs(quick).items()):
        if count % 20 == 0:
            jax.clear_caches()  # compiled programs fill the memory
        try:
            made = make()
        except Exception as error:
            found[name] = type(error).__name__
            continue
        graph = without_places(getattr(made, "ir", made))
        known |= {graph.target} | {n.op for stage in (graph, graph.quantized) if stage is not None for n in stage.nodes}
        for kind, write in artifacts(graph, name, quick).items():
            try:
                value = write()
                data = value if isinstance(value, bytes) else repr(value).encode()
                found[f"{name}: {kind}"] = hashlib.sha256(data).hexdigest()[:16]
            except Exception as error:
                found[f"{name}: {kind}"] = type(error).__name__
    lacking = sorted({*ops.names(), *targets.names()} - known - NEVER)
    if lacking:
        raise ValueError(f"bits: expected a graph of every operation and target, got none of {', '.join(lacking)}.")
    return found


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 where an entry moved."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bits", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the hashes there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="list what differs from the hashes there")
    parser.add_argument("--quick", action="store_true", help="the part that takes a few minutes")
    args = parser.parse_args(argv)
    if args.write is None and args.against is None:
        parser.error("expected --write FILE, --against FILE or both.")
    warnings.simplefilter("ignore")
    found = entries(args.quick)
    if args.write is not None:
        args.write.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    before = found if args.against is None else json.loads(args.against.read_text())
    moved = [key for key in sorted(found.keys() | before.keys()) if found.get(key) != before.get(key)]
    for key in moved:
        print(f"{key}: {before.get(key, 'no entry')} -> {found.get(key, 'no entry')}")
    hashes = sum(len(value) == 16 and set(value) <= set("0123456789abcdef") for value in found.values())
    print(f"{len(moved)} of {len(found)} entries moved; {hashes} are hashes, the others classes of errors.")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
