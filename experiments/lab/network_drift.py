"""Trained and pretrained networks, each node under a target beside the reference's."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA
from experiments.accuracy.networks import TASKS
from experiments.lab.chains import Codes, codes_of
from qjax.graph.ir import Graph
from qjax.run.stepwise import Runner

FOLDER = Path("out/accuracy")
"""Where float networks are kept, the same as those of `python -m experiments.accuracy`."""
FULL = ("ResNet", "depthwise CNN", "efficientnet-lite0")
QUICK = ("CNN on digits",)
EXAMPLES = {"ResNet": 256, "depthwise CNN": 256, "efficientnet-lite0": 16, "CNN on digits": 256}
"""How many test images."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A calibrated network under `nearest_even`. ir: its graph. reference: all codes of a run."""

    graph: qjax.IntegerGraph
    ir: Graph
    reference: Codes


@functools.lru_cache(maxsize=4)
def prepared(name: str, seed: int) -> Prepared:
    """The network with 8-bit weights per channel and 8-bit activations, calibrated."""
    model, calibration, test = _pretrained(name) if name == "efficientnet-lite0" else _trained(name, seed)
    recipe = qjax.Recipe(weights=qjax.QSpec(axis=-1), activations=qjax.QSpec(symmetric=False))
    qmodel = qjax.quantize(model, recipe, calibration[0])
    qjax.calibrate(qmodel, calibration, progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, calibration[0], target="nearest_even")
    return Prepared(graph, graph.ir, codes_of(graph, graph.quantize(test)))


def _trained(name: str, seed: int) -> tuple[Any, list[np.ndarray], np.ndarray]:
    task = TASKS[name]
    data = DATA[task.data]()
    calibration = [data.train_images[i : i + 64] for i in range(0, 512, 64)]
    return float_model(name, task, data, seed, FOLDER), calibration, data.test_images[: EXAMPLES[name]]


def _pretrained(name: str) -> tuple[Any, list[np.ndarray], np.ndarray]:
    # it needs `make weights`, which only the full form asks for
    from experiments.real.networks import NETWORKS

    network = NETWORKS[name]()
    test = np.concatenate([batch[0] for batch in network.test])
    # crops of one photo lie beside each other
    chosen = test[:: len(test) // EXAMPLES[name]][: EXAMPLES[name]]
    return network.model, [batch[0] for batch in network.calibration], chosen


@functools.lru_cache(maxsize=32)
def alone(name: str, seed: int, target: str) -> Mapping[str, np.ndarray]:
    """Output tensor of each node -> what differs in the node on the reference's inputs, int16, in steps.

    Raises:
      ValueError: the target writes other nodes than the reference, or cannot take the network.
    """
    known = prepared(name, seed)
    runner = _runner(known, target)
    found: dict[str, np.ndarray] = {}
    for node in runner.ir.nodes:
        own = np.asarray(runner.output(node, [known.reference[key] for key in node.inputs]))
        found[node.output] = np.subtract(own, known.reference[node.output], dtype=np.int16)
    jax.clear_caches()  # a process can map only so many compiled kernels (Linux: vm.max_map_count)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """shares: output tensor of each node -> the share of its codes that differ. last: of the last node, in steps."""

    shares: Mapping[str, float]
    last: np.ndarray


@functools.lru_cache(maxsize=32)
def end_to_end(name: str, seed: int, target: str) -> Whole:
    """How the whole network's codes differ from the same input codes."""
    known = prepared(name, seed)
    runner = _runner(known, target)
    codes: dict[str, Any] = {key: known.reference[key] for key in runner.ir.inputs}
    for node in runner.ir.nodes:
        codes[node.output] = np.asarray(runner.output(node, [codes[key] for key in node.inputs]))
    jax.clear_caches()
    names = [node.output for node in runner.ir.nodes]
    shares = {key: float(np.mean(codes[key] != known.reference[key])) for key in names}
    return Whole(shares, np.subtract(codes[names[-1]], known.reference[names[-1]], dtype=np.int16))


def _runner(known: Prepared, target: str) -> Runner:
    graph = known.graph.retarget(target)
    mine, theirs = ([(node.name, node.op) for node in ir.nodes] for ir in (graph.ir, known.ir))
    if mine != theirs:
        raise ValueError(f"expected a target with the nodes of nearest_even; {target} writes others.")
    return Runner(graph.ir, graph.target, graph.interpreter.constants)
