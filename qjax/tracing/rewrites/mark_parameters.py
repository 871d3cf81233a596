"""Marks the values that depend only on parameters and literals, so that rewriters treat them as constants."""

from collections.abc import Sequence

from qjax.tracing.program import Program, Value


def mark_fixed(program: Program, constant: Sequence[bool]) -> None:
    """Set `Value.fixed` throughout a program, bodies included.

    constant: per input, whether it is a parameter (or other state) rather than data; () is all data.
    """
    for value, is_constant in zip(program.inputs, constant, strict=bool(constant)):
        value.fixed = is_constant
    for eqn in program.equations:
        known = [_is_fixed(value) for value in eqn.inputs]
        if eqn.body is not None:
            first = eqn.params.get("num_consts", 0)
            carry = range(first, first + eqn.params.get("num_carry", 0))
            mark_fixed(eqn.body, [is_fixed and index not in carry for index, is_fixed in enumerate(known)])
        inner = [_is_fixed(value) for value in eqn.body.outputs] if eqn.primitive == "remat" and eqn.body else []
        for index, value in enumerate(eqn.outputs):
            value.fixed = all(known) or (bool(inner) and inner[index])


def _is_fixed(value: Value) -> bool:
    return value.fixed or value.constant is not None
