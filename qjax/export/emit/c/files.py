"""The text of the files: NAME.h, NAME.c, NAME_test.c and a Makefile."""

import math
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.c import stepping
from qjax.export.emit.c.blocks import Source, loop_head
from qjax.export.emit.c.helpers import helper_texts, without_unused
from qjax.export.emit.c.index import Index
from qjax.export.emit.c.memory import Access, Place, Step
from qjax.export.emit.c.program import Program
from qjax.export.emit.c.text import STORED, comment, identifier, table
from qjax.export.emit.c.vectors import vectors_of
from qjax.graph.ir import Graph, Tensor
from qjax.support.names import Names, short_location

FLAGS = "-std=c99 -O3 -Wall -Wextra -Wpedantic -Werror -Wconversion -Wsign-conversion -Wshadow"


def parameters(graph: Graph) -> tuple[list[str], list[str]]:
    """The names of the inputs and outputs in the public function."""
    names = Names(["arena"])
    wanted = [("x" if len(graph.inputs) == 1 else f"x{i}") for i in range(len(graph.inputs))]
    wanted += [("y" if len(graph.outputs) == 1 else f"y{i}") for i in range(len(graph.outputs))]
    fresh = [names.fresh(name) for name in wanted]
    return fresh[: len(graph.inputs)], fresh[len(graph.inputs) :]


def prototype(program: Program, name: str) -> str:
    """The public function without its semicolon."""
    graph = program.graph
    inputs, outputs = parameters(graph)
    arguments = [f"const {STORED[graph.tensors[t].dtype]} *{p}" for t, p in zip(graph.inputs, inputs, strict=True)]
    arguments += [f"{STORED[graph.tensors[t].dtype]} *{p}" for t, p in zip(graph.outputs, outputs, strict=True)]
    return f"void {name}_run({', '.join([*arguments, 'void *arena'])})"


def header(program: Program, name: str) -> str:
    """NAME.h."""
    graph, upper = program.graph, name.upper()
    inputs, outputs = parameters(graph)
    plan = program.plan
    lines = comment(
        f"A quantized network in integers{_with_floats(graph)}, written by qjax for the target {graph.target!r}.\n\n"
        f"{name}_run reads codes and writes codes, batch {program.batch}, arrays stored row by row. Inputs, outputs "
        f"and arena must not overlap. The arena needs {upper}_ARENA_SIZE bytes, aligned to {upper}_ARENA_ALIGN; its "
        "content before and after a call does not matter (a null pointer will do where the size is 0). The function "
        "keeps no state: calls with different arenas may run at the same time.\n\n"
        f"A code q stands for (q - ZERO_POINT) * SCALE, SCALE being SCALE_MANTISSA * 2^SCALE_EXPONENT exactly.\n\n"
        f"Memory: constants take {program.source.table_bytes} bytes, of these weights {program.source.weight_bytes} "
        "(where all codes of a kernel fit 4 bits they are stored two to a byte, in 2 bits four). Local arrays take at "
        f"most {upper}_STACK_SIZE bytes of the stack at once; compilers keep some hundred more there."
    )
    guard = f"{upper}_H"
    lines += [f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", ""]
    lines += [
        f"#define {upper}_BATCH {program.batch}",
        f"#define {upper}_ARENA_SIZE {plan.size}",
        f"#define {upper}_ARENA_ALIGN {plan.alignment}",
        f"#define {upper}_STACK_SIZE {program.stack}",
        "",
        *_arena(program, name),
        "",
    ]
    for tensor, parameter in (*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)):
        lines += _described(program, graph.tensors[tensor], f"{upper}_{parameter.upper()}", parameter)
    held = stepping.members(program, inputs, outputs)
    lines += stepping.described(held, name)
    lines += ["#ifdef __cplusplus", 'extern "C" {', "#endif", ""]
    functions = [prototype(program, name), *stepping.prototypes(held, name, graph, inputs, outputs)]
    lines += [
        *(f"{function};" for function in functions),
        "",
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "",
        f"#endif /* {guard} */",
    ]
    return "\n".join(lines) + "\n"


def _with_floats(graph: Graph) -> str:
    return ", with parts in IEEE 754 floats" if any(t.dtype == "float32" for t in graph.tensors.values()) else ""


def _arena(program: Program, name: str) -> list[str]:
    """The type of an array that can serve as an arena."""
    plan = program.plan
    widths = sorted({1, *plan.widths})
    text = (
        f"For `static {name}_arena arena[{name.upper()}_ARENA_LENGTH];`. Memory from an allocator serves as well. No "
        "byte of the arena is ever used as more than one type wider than a character (int8_t, uint8_t), even where "
        "layers take turns, so C's rules of aliasing hold at every level of optimization."
    )
    members = [f"    int{8 * width}_t as_int{8 * width}[{plan.alignment // width}];" for width in widths]
    members += [f"    float as_float[{plan.alignment // 4}];"] if plan.reals else []
    return [
        *comment(text),
        "typedef union {",
        *members,
        f"}} {name}_arena;",
        "",
        f"#define {name.upper()}_ARENA_LENGTH {max(plan.size // plan.alignment, 1)}",
    ]


def _described(program: Program, tensor: Tensor, macro: str, parameter: str) -> list[str]:
    shape = program.shapes[tensor.name]
    size = "x".join(map(str, shape)) or "one"
    lines = [f"#define {macro}_SIZE {math.prod(shape)}"]
    q = tensor.quantization
    text = f"{parameter}: {tensor.name}, {tensor.dtype}, {size}"
    if q is not None and np.size(q.scale) == 1:
        scale = float(np.asarray(q.scale).reshape(-1)[0])
        mantissa, exponent = math.frexp(scale)
        whole = int(mantissa * 2**24)
        exponent -= 24
        while whole % 2 == 0:
            whole, exponent = whole // 2, exponent + 1
        lines += [
            f"#define {macro}_ZERO_POINT ({int(np.asarray(q.zero_point).reshape(-1)[0])})",
            f"#define {macro}_SCALE_MANTISSA {whole}",
            f"#define {macro}_SCALE_EXPONENT ({exponent})",
            f"#define {macro}_MIN ({q.qmin})",
            f"#define {macro}_MAX ({q.qmax})",
        ]
        text += f", scale {scale!r} = {scale.hex()}, codes {q.qmin} to {q.qmax}"
    return [*comment(text), *lines, ""]


def source(program: Program, name: str) -> str:
    """NAME.c."""
    chunks = [
        "\n".join(comment(f"Written by qjax for the target {program.graph.target!r}; see {name}.h.")),
        f'#include "{name}.h"',
        *definitions([program], program.source, [name]),
    ]
    return "\n\n".join(chunks) + "\n"


def definitions(programs: Sequence[Program], shared: Source, names: Sequence[str]) -> list[str]:
    """Helpers, functions of integers, tables, layers and public functions of some models."""
    layers = [_function(program, step) for program in programs for step in program.steps]
    runs = [text for program, name in zip(programs, names, strict=True) for text in _functions(program, name)]
    own = [*shared.texts, *shared.table_texts, *layers, *runs]
    vectors = vectors_of(shared)
    return [*without_unused(helper_texts(shared.helpers, vectors.helpers if vectors else {}), own), *own]


def _arguments(program: Program, step: Step) -> list[tuple[str, str, Access]]:
    """The arguments of a layer's function: (type, name, the access that it reads or writes)."""
    used = {access.buffer for access in step.layer.accesses}
    single = len(step.inputs) == 1
    found: list[tuple[str, str, Access]] = []
    for index, access in enumerate(step.inputs):
        parameter = "in" if single else f"in{index}"
        if parameter in used:
            found.append((f"const {STORED[program.dtypes[access.memory]]} *", parameter, access))
    found.append((f"{STORED[program.dtypes[step.output.memory]]} *", "out", step.output))
    found += [(f"{STORED[b.dtype]} *", b.name, Access(f"{step.name}/{b.name}")) for b in step.layer.scratch]
    return found


def _function(program: Program, step: Step) -> str:
    arguments = _arguments(program, step)
    places = [program.places[access.memory] for _, _, access in arguments]
    # arguments that share memory must not be declared `restrict`
    apart = {p for p in places if places.count(p) == 1}
    head = ", ".join(
        f"{kind}{'restrict ' if place in apart else ''}{name}"
        for (kind, name, _), place in zip(arguments, places, strict=True)
    )
    note = comment(_note(program, step))
    return "\n".join([*note, f"static void {step.name}({head})", "{", *_indented(step.layer.root.lines), "}"])


def _note(program: Program, step: Step) -> str:
    if step.node is None:
        return step.note
    node, graph = step.node, program.graph
    place = short_location(node.location)
    lines = [f"{node.name}: {node.op}" + (f", {place}" if place else "")]
    for name in (*node.inputs, node.output):
        lines.append(f"{'out' if name == node.output else 'in'} {_tensor(program, graph.tensors[name])}")
    return "\n".join(lines)


def _tensor(program: Program, tensor: Tensor) -> str:
    shape = "x".join(map(str, program.shapes[tensor.name])) or "one"
    q = tensor.quantization
    if q is None or np.size(q.scale) != 1:
        return f"{tensor.name}: {tensor.dtype} {shape}"
    scale, zero = float(np.asarray(q.scale).reshape(-1)[0]), int(np.asarray(q.zero_point).reshape(-1)[0])
    return f"{tensor.name}: {tensor.dtype} {shape}, scale {scale!r}, zero point {zero}"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _run(program: Program, name: str) -> str:
    graph = program.graph
    inputs, outputs = parameters(graph)
    starts = {loop.first: loop.count for loop in program.loops}
    ends = {loop.last for loop in program.loops}
    lines: list[str] = []
    depth, used = "", False
    for index, step in enumerate(program.steps):
        if index in starts:
            lines.append(loop_head("turn", starts[index]))
            depth = "    "
        texts: list[str] = []
        for kind, _, access in _arguments(program, step):
            place = program.places[access.memory]
            used = used or place.kind == "arena"
            texts.append(_pointer(program, place, kind, access, inputs, outputs))
        lines.append(f"{depth}{step.name}({', '.join(texts)});")
        if index + 1 in ends:
            lines.append("}")
            depth = ""
    memory = ["unsigned char *const base = arena;"] if used else ["(void)arena;"]
    unread = [f"(void){p};" for p in inputs if not any(f"({p}" in line or f" {p}" in line for line in lines)]
    return "\n".join([prototype(program, name), "{", *_indented([*memory, *unread, *lines]), "}"])


def _functions(program: Program, name: str) -> list[str]:
    """The public functions."""
    names = parameters(program.graph)
    held = stepping.members(program, *names)
    return [_run(program, name), *stepping.functions(held, name, program.graph, *names)]


def _pointer(
    program: Program, place: Place, kind: str, access: Access, inputs: Sequence[str], outputs: Sequence[str]
) -> str:
    offset = Index({"turn": (access.turn, 0, 1)} if access.turn else {}, access.offset)
    moved = "" if not access.turn and not access.offset else str(offset)
    if place.kind != "arena":
        base = (inputs if place.kind == "input" else outputs)[place.position]
        return base if not moved else f"{base} + {moved}"
    if not access.turn:
        width = np.dtype(program.dtypes[access.memory]).itemsize if access.offset else 1
        return f"({kind.strip()})(void *)(base + {place.position + access.offset * width})"
    return f"({kind.strip()})(void *)(base + {place.position}) + {moved}"


def selftest(
    program: Program,
    name: str,
    cases: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]],
    steps: stepping.Steps | None = None,
) -> str:
    """NAME_test.c: runs golden vectors and compares every code. cases: (inputs, outputs) of single runs.

    steps: for a graph with a state, consecutive golden steps.
    """
    graph, upper = program.graph, name.upper()
    lines = comment(f"Runs {name}_run on golden vectors. Prints what differs; exits with 0 where nothing does.")
    lines += ["#include <stdint.h>", "#include <stdio.h>", "", f'#include "{name}.h"', ""]
    inputs, outputs = parameters(graph)
    for index in range(len(cases)):
        for parameter, array in (
            *zip(inputs, cases[index][0], strict=True),
            *zip(outputs, cases[index][1], strict=True),
        ):
            lines += [*table(f"{parameter}_{index}", array), ""]
    lines += [
        f"static {name}_arena arena[{upper}_ARENA_LENGTH];",
        "",
    ]
    for parameter, tensor in zip(outputs, graph.outputs, strict=True):
        size = max(math.prod(program.shapes[tensor]), 1)
        lines.append(f"static {STORED[graph.tensors[tensor].dtype]} {parameter}[{size}];")
    stepped: list[str] = []
    count = sum(math.prod(program.shapes[tensor]) for tensor in graph.outputs) * len(cases)
    if steps is not None:
        arrays, stepped, more = stepping.selftest(program, name, steps, (inputs, outputs))
        lines += ["", *arrays]
        count += more
    lines += ["", "int main(void)", "{", "    long wrong = 0;", "    long i;"]
    for index in range(len(cases)):
        arguments = [*(f"{p}_{index}" for p in inputs), *outputs, "arena"]
        lines.append(f"    {name}_run({', '.join(arguments)});")
        for parameter, tensor in zip(outputs, graph.outputs, strict=True):
            size = math.prod(program.shapes[tensor])
            form, kind = ("%.9g", "double") if graph.tensors[tensor].dtype == "float32" else ("%ld", "long")
            lines += [
                f"    for (i = 0; i < {size}; i++) {{",
                f"        if ({parameter}[i] != {parameter}_{index}[i]) {{",
                "            wrong++;",
                f'            printf("vector {index}, {parameter}[%ld]: expected {form}, got {form}\\n", i,'
                f" ({kind}){parameter}_{index}[i], ({kind}){parameter}[i]);",
                "        }",
                "    }",
            ]
    lines += stepped
    lines += [
        f'    printf("{name}: %ld of {count} codes differ, arena of %ld bytes\\n", wrong, (long){upper}_ARENA_SIZE);',
        "    return wrong == 0 ? 0 : 1;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def makefile(name: str) -> str:
    """The Makefile, which builds and runs the self-test."""
    return (
        f"# make test: builds the self-test and runs it\nCC ?= cc\nCFLAGS ?= {FLAGS}\n\n"
        f"{name}_test: {name}.c {name}.h {name}_test.c\n"
        f"\t$(CC) $(CFLAGS) -o $@ {name}.c {name}_test.c\n\n"
        f".PHONY: test clean\ntest: {name}_test\n\t./{name}_test\n\nclean:\n\trm -f {name}_test\n"
    )


__all__ = ["FLAGS", "definitions", "header", "identifier", "makefile", "parameters", "prototype", "selftest", "source"]
