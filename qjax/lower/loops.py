"""Equations with a body: remat lowers it once, a scan once per iteration."""

from collections.abc import Callable
from typing import Any

from qjax.lower.builder import Builder
from qjax.lower.quantizers import quantized
from qjax.lower.stacks import part_of, stack_of
from qjax.lower.values import Env, Step, get
from qjax.tracing import Equation, Program

Run = Callable[[Program, Env, Step], None]
"""Lowers a program's equations, and adds what they make to the environment."""


def body(builder: Builder, eqn: Equation, program: Program, found: list[Any], step: Step, run: Run) -> list[Any]:
    """What the outputs of an equation with a body are."""
    if eqn.primitive == "remat":
        env: Env = dict(zip(program.inputs, found, strict=True))
        run(program, env, step)
        return [get(env, value) for value in program.outputs]
    return _scan(builder, eqn, program, found, step, run)


def _scan(builder: Builder, eqn: Equation, program: Program, found: list[Any], step: Step, run: Run) -> list[Any]:
    fixed, carried, length = eqn.params["num_consts"], eqn.params["num_carry"], eqn.params["length"]
    carry = list(found[fixed : fixed + carried])
    for index, f in enumerate(carry):
        place = builder.annotation.weights.get((eqn, fixed + index))
        if place is not None:
            carry[index] = quantized(builder, place, eqn.inputs[fixed + index], f, eqn, step)
    stacks: list[list[Any]] = [[None] * length for _ in eqn.outputs[carried:]]
    order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    for iteration in order:
        here = (*step, iteration)
        parts = [part_of(builder, f, iteration, eqn, here) for f in found[fixed + carried :]]
        env: Env = {}
        for value, f in zip(program.inputs, [*found[:fixed], *carry, *parts], strict=True):
            env[value] = f
            place = builder.annotation.values.get(value)
            if place is not None:
                env[value] = quantized(builder, place, value, f, eqn, here)
        run(program, env, here)
        outputs = [get(env, value) for value in program.outputs]
        carry = outputs[:carried]
        for stack, output in zip(stacks, outputs[carried:], strict=True):
            stack[iteration] = output
    return [*carry, *(stack_of(builder, stack, eqn, step) for stack in stacks)]
