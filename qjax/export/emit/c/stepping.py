"""The functions of a graph with a state: `NAME_init` writes its initial codes, `NAME_step` runs the network on it.

The state is a struct of the caller. It contains every array twice: a call reads one and writes the other, so neither is
copied.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.c.blocks import loop_head
from qjax.export.emit.c.program import Program
from qjax.export.emit.c.text import STORED, comment, identifier, table
from qjax.graph import state
from qjax.graph.ir import Graph, Tensor
from qjax.run.interpreter import Interpreter
from qjax.support.names import Names


@dataclasses.dataclass(frozen=True)
class Member:
    """One array of the state. input, output: its names as parameters of `NAME_run`; "" if that does not read it."""

    name: str
    tensor: Tensor
    size: int
    input: str
    output: str

    @property
    def first(self) -> int:
        """The code of 0, with which the array starts."""
        q = self.tensor.quantization
        return 0 if q is None else int(np.clip(np.asarray(q.zero_point).reshape(-1)[0], q.qmin, q.qmax))


def members(program: Program, inputs: Sequence[str], outputs: Sequence[str]) -> list[Member]:
    """The arrays of the state; empty for a graph without one. inputs, outputs: the parameters of `NAME_run`."""
    graph = program.graph
    names, found = Names(["turn"]), list[Member]()
    for part in state.parts(graph):
        tensor = part.tensor(graph)
        short = tensor.name.split("/", 2)[-1] if tensor.name.startswith("input/") else tensor.name
        parameter = "" if part.input is None else inputs[graph.inputs.index(part.input)]
        size = math.prod(program.shapes[tensor.name])
        found.append(Member(names.fresh(identifier(short)), tensor, size, parameter, outputs[part.output]))
    return found


def described(held: Sequence[Member], name: str) -> list[str]:
    """The declaration of the struct, for NAME.h."""
    if not held:
        return []
    text = (
        f"What the network keeps between two calls: codes. {name}_init writes the codes of zeros; to begin with other "
        f"values, overwrite [0] of the arrays then. {name}_step reads the arrays at [turn], writes those at [1 - turn] "
        "and flips turn. Different states may be stepped at the same time, with different arenas."
    )
    arrays = [f"    {STORED[m.tensor.dtype]} {m.name}[2][{max(m.size, 1)}];" for m in held]
    return [*comment(text), "typedef struct {", *arrays, "    int turn;", f"}} {name}_state;", ""]


def prototypes(
    held: Sequence[Member], name: str, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]
) -> list[str]:
    """Both functions without their semicolons."""
    if not held:
        return []
    own_in, own_out = {m.input for m in held}, {m.output for m in held}
    arguments = [f"{name}_state *state"]
    arguments += [
        f"const {STORED[graph.tensors[t].dtype]} *{p}"
        for t, p in zip(graph.inputs, inputs, strict=True)
        if p not in own_in
    ]
    arguments += [
        f"{STORED[graph.tensors[t].dtype]} *{p}"
        for t, p in zip(graph.outputs, outputs, strict=True)
        if p not in own_out
    ]
    return [f"void {name}_init({name}_state *state)", f"void {name}_step({', '.join([*arguments, 'void *arena'])})"]


def functions(
    held: Sequence[Member], name: str, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]
) -> list[str]:
    """Both functions, for NAME.c."""
    if not held:
        return []
    init, step = prototypes(held, name, graph, inputs, outputs)
    writes = [
        line
        for m in held
        for line in (f"    {loop_head('i', m.size)}", f"        state->{m.name}[0][i] = {m.first};", "    }")
    ]
    reads = {m.input: f"state->{m.name}[now]" for m in held if m.input}
    stores = {m.output: f"state->{m.name}[1 - now]" for m in held}
    arguments = [*(reads.get(p, p) for p in inputs), *(stores.get(p, p) for p in outputs), "arena"]
    return [
        "\n".join([init, "{", *writes, "    state->turn = 0;", "}"]),
        "\n".join(
            [
                step,
                "{",
                "    const int now = state->turn != 0;",
                f"    {name}_run({', '.join(arguments)});",
                "    state->turn = 1 - now;",
                "}",
            ]
        ),
    ]


Steps = tuple[list[tuple[list[np.ndarray], list[np.ndarray]]], list[np.ndarray]]
"""Golden steps from the initial state on: for each the other inputs and outputs; and the last state."""


def golden(program: Program, cases: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]) -> Steps | None:
    """Steps on the inputs of golden runs, one after another; None for a graph without a state."""
    graph = program.graph
    parts = state.parts(graph)
    if not parts:
        return None
    interpreter = Interpreter(graph)
    own_in, own_out = {part.input for part in parts}, {part.output for part in parts}
    held = [np.full(program.shapes[m.tensor.name], m.first, m.tensor.dtype) for m in members(program, *_numbers(graph))]
    steps: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    for inputs, _ in cases:
        before = {part.input: array for part, array in zip(parts, held, strict=True)}
        given = dict(zip(graph.inputs, inputs, strict=True))
        found = [np.asarray(x) for x in interpreter(*(before.get(name, given[name]) for name in graph.inputs))]
        held = [found[part.output] for part in parts]
        steps.append(
            (
                [given[name] for name in graph.inputs if name not in own_in],
                [x for position, x in enumerate(found) if position not in own_out],
            )
        )
    return steps, held


def _numbers(graph: Graph) -> tuple[list[str], list[str]]:
    return [str(i) for i in range(len(graph.inputs))], [str(i) for i in range(len(graph.outputs))]


def selftest(
    program: Program,
    name: str,
    found: Steps,
    names: tuple[Sequence[str], Sequence[str]],
) -> tuple[list[str], list[str], int]:
    """The arrays and the statements of NAME_test.c that run golden steps, and how many codes these compare.

    names: the parameters of `NAME_run`.
    """
    held = members(program, *names)
    inputs = [p for p in names[0] if p not in {m.input for m in held}]
    outputs = [p for p in names[1] if p not in {m.output for m in held}]
    steps, last = found
    arrays, lines = [f"static {name}_state state;"], [f"    {name}_init(&state);"]
    count = 0
    for index, (given, wanted) in enumerate(steps):
        for parameter, array in (*zip(inputs, given, strict=True), *zip(outputs, wanted, strict=True)):
            arrays += table(f"{parameter}_step_{index}", array)
        arguments = ["&state", *(f"{p}_step_{index}" for p in inputs), *outputs, "arena"]
        lines.append(f"    {name}_step({', '.join(arguments)});")
        for parameter, array in zip(outputs, wanted, strict=True):
            lines += _compared(parameter, f"{parameter}_step_{index}", array.size)
            count += array.size
    for member, array in zip(held, last, strict=True):
        arrays += table(f"{member.name}_last", array)
        lines += _compared(f"state.{member.name}[state.turn]", f"{member.name}_last", array.size)
        count += array.size
    return arrays, lines, count


def _compared(found: str, wanted: str, size: int) -> list[str]:
    return [f"    for (i = 0; i < {size}; i++) {{", f"        wrong += {found}[i] != {wanted}[i];", "    }"]
