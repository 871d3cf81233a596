"""Verilog and VHDL: writes a small model as one circuit, for FPGAs.

Every operation of the graph becomes separate logic; nothing is shared, so a new example can enter with every clock. The
kernels of `qjax.ops`, traced by JAX, are translated to the integers of alkaid (https://github.com/calad0i/alkaid),
which builds products with known weights from adders (distributed arithmetic) and writes the project. A testbench with
golden runs is included.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.contrib.rtl import circuits, project, words
from qjax.contrib.rtl.ports import port_of
from qjax.contrib.rtl.project import Circuit
from qjax.export.emit import elementwise_as_shift
from qjax.export.emit.golden import Case, golden
from qjax.export.files import write_folder
from qjax.graph.ir import Graph, Node
from qjax.graph.kernels import attributes, constants_of, prepare, run_node
from qjax.support.errors import Unsupported
from qjax.support.progress import say

__all__ = ["build", "emit", "to_files"]

LANGUAGES = ("verilog", "vhdl")
_CHECKED = 256
"""On this many random examples alkaid's emulator must equal the interpreter before anything is written."""


def emit(graph: Graph, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a project into a folder: sources, a testbench, scripts for Vivado and Quartus, and the layout of the ports.

    The top module is `NAME_wrapper`: `model_inp` has the codes of all inputs of one example, `model_out` those of all
    outputs. `NAME_ports.json` describes where each tensor lies, how many bits a code has, and its scale and zero point.

    Args:
      graph: a finished graph without float islands. Each layer is written in full, so it must be small: some ten
        thousand multiplications of an example.
      path: the folder, which is created if necessary. Either all files are written, or none.
      options: those of `build`.

    Raises:
      TypeError: an unknown option. Otherwise as `build`; then nothing is written.
    """
    circuit, files = build(graph, **options)
    folder = os.fspath(path)
    write_folder(folder, files, (".v", ".sv", ".vhd", ".vhdl"))
    say(
        f"{folder}: {len(circuit.logic.ops)} operations, about {circuit.logic.cost:.0f} lookup tables "
        "(alkaid's estimate)"
    )


def to_files(graph: Graph, **options: Any) -> dict[str, bytes]:
    """The files that `emit` writes, by path in the folder; options: those of `build`. Raises the same errors."""
    return build(graph, **options)[1]


def build(
    graph: Graph,
    *,
    name: str = "model",
    language: str = "verilog",
    stages: int = 0,
    vectors: int = 16,
    device: str = "xcvu13p-flga2577-2-e",
    period: float = 5.0,
) -> tuple[Circuit, dict[str, bytes]]:
    """The circuit, and the files that `emit` writes, by path in the folder.

    Args:
      name: of the top module; an identifier.
      language: "verilog" or "vhdl" (2008).
      stages: of the pipeline; a result appears `stages + 1` clocks after its example. 0: logic without a clock.
      vectors: how many golden runs the testbench contains; the first two use the lowest and the highest codes.
      device, period: the part and the clock (ns) in the scripts and constraints.

    Raises:
      ModuleNotFoundError: alkaid is not installed; the message names what to install.
      Unsupported: a node has no form in a circuit; the message names it.
      ValueError: an option has no meaning.
      RuntimeError: alkaid's emulator computes other codes than the graph.
    """
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) is None:
        raise ValueError(f"RTL: expected a name of letters, digits and single underscores, got {name!r}.")
    if language not in LANGUAGES:
        raise ValueError(f"RTL: expected one of the languages {', '.join(LANGUAGES)}, got {language!r}.")
    for what, number, least in (("stages", stages, 0), ("vectors", vectors, 0)):
        if type(number) is not int or number < least:
            raise ValueError(f"RTL: expected {what} of at least {least}, got {number!r}.")
    if type(device) is not str or not device:
        raise ValueError(f"RTL: expected the name of a device, got {device!r}.")
    if type(period) not in (int, float) or not period > 0:
        raise ValueError(f"RTL: expected a period in nanoseconds above 0, got {period!r}.")
    circuit = circuit_of(graph)
    check(circuit)
    files = project.files(circuit, name, language, stages, device, period, _golden(circuit, vectors))
    return circuit, files


def circuit_of(graph: Graph) -> Circuit:
    """The circuit of one example.

    Raises:
      ModuleNotFoundError: alkaid is not installed. Unsupported: a node has no form; the message names it.
    """
    trace, constants = words.load("alkaid.trace"), prepare(graph)
    env: dict[str, np.ndarray] = {name: np.asarray(data) for name, data in graph.data().items()}
    variables = list[Any]()
    inputs = [port_of(graph, name, constants) for name in graph.inputs]
    for given in inputs:
        env[given.name] = np.empty(given.shape, object)
        # alkaid assumes that all numbers have as many bits when it optimizes
        low, high = (-(1 << given.bits - 1), (1 << given.bits - 1) - 1) if given.signed else (0, (1 << given.bits) - 1)
        for place in np.ndindex(*given.shape):
            variables.append(trace.FVariable(low, high, 1, hwconf=words.hardware()))
            env[given.name][place] = words.word(variables[-1])
    for node in graph.nodes:
        try:
            env[node.output] = _node(graph, node, constants[node.name], [env[name] for name in node.inputs])
        except Unsupported as error:
            raise error.at(f"RTL: node {node.name!r} ({node.op})", node.location) from None
    outputs = [port_of(graph, name, constants) for name in graph.outputs]
    results = [words.settled(word) for made in outputs for word in circuits.lifted(env[made.name]).ravel()]
    return Circuit(graph, tuple(inputs), tuple(outputs), trace.trace(variables, results, keep_dead_inputs=True))


def _node(graph: Graph, node: Node, constants: Mapping[str, Any], inputs: list[np.ndarray]) -> np.ndarray:
    dtypes = [graph.tensors[name].dtype for name in node.inputs]
    try:
        return circuits.trace(lambda *arrays: run_node(graph, node, constants, arrays), inputs, dtypes)
    except Unsupported:
        # its own kernel is too wide, or in float, so use a form that is proven to compute the same codes
        plane = elementwise_as_shift.of_node(node.op, attributes(graph, node), constants_of(graph, node))
        if plane is None:
            raise
        return circuits.trace(elementwise_as_shift.kernel(plane, graph.tensors[node.output].dtype), inputs, dtypes)


def _golden(circuit: Circuit, count: int) -> list[Case]:
    """Runs on numbers that the ports can have."""
    shapes = {port.name: port.shape for port in circuit.inputs}
    return golden(circuit.graph, shapes, count, ends={port.name: (port.low, port.high) for port in circuit.inputs})


def check(circuit: Circuit) -> None:
    """Raise an error unless alkaid's emulator of the circuit computes the interpreter's codes for random examples."""
    cases = _golden(circuit, _CHECKED)
    given, expected = (
        np.array([np.concatenate([x.ravel() for x in case[side]]) for case in cases], np.float64) for side in (0, 1)
    )
    found = np.asarray(circuit.logic.predict(given)).reshape(expected.shape)
    if (wrong := int(np.sum(found != expected))) > 0:
        raise RuntimeError(
            f"RTL: {wrong} of {expected.size} codes of the circuit differ from the graph; nothing is written. "
            "This is a bug of qjax or alkaid: please report it with the model."
        )
