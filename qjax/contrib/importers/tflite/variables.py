"""State that a model stores between calls: its variables become inputs and outputs.

    READ_VARIABLE(h), y = f(x, h), ASSIGN_VARIABLE(h, g(x, h))    ->    (x, h) -> (f(x, h), g(x, h))

A streaming model reads a variable (READ_VARIABLE), appends what is new, and writes the rest back (ASSIGN_VARIABLE). The
graph has an input for the value before the call and an output for the value after it, so it has no state itself.
CALL_ONCE names the subgraph with the initial values; they are in the graph's metadata, "states".
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.tflite_schema.flatbuffer import damaged
from qjax.export.tflite_schema.model import VARIABLE, FileTensor, Model, Operator
from qjax.support.errors import Problems, Unsupported

KINDS = frozenset({"CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"})
RECURRENT = frozenset({"UNIDIRECTIONAL_SEQUENCE_LSTM", "SVDF"})
_KEPT = "Leave it out of the model, and store the value outside"


@dataclasses.dataclass
class State:
    """One variable. before: the tensor with which the call begins. after: the one with which it ends."""

    name: str
    first: FileTensor
    value: int
    before: int | None = None
    after: int | None = None


def without_variables(model: Model) -> tuple[Model, list[State], Problems]:
    """The model with its variables as inputs and outputs; a variable that is only read or only written is an error."""
    model, own = _of_operators(model)
    changed, states, problems = _without_handles(model)
    return changed, [*own, *states], problems


def _of_operators(model: Model) -> tuple[Model, list[State]]:
    """Tensors that recurrent operators read and write: the value after the call becomes another of their outputs."""
    tensors, states, operators = list(model.tensors), list[State](), list[Operator]()
    readers = [index for operator in model.operators for index in operator.inputs if index >= 0]
    for operator in model.operators:
        for index in operator.inputs if operator.name in RECURRENT else ():
            held = tensors[index] if index >= 0 else None
            if held is None or held.unusual != VARIABLE or held.span is not None or readers.count(index) > 1:
                continue
            # the initial value of a variable is its zero point for int8, and 0 for int16
            first = int(held.zero_point[0]) if held.dtype == "int8" and held.zero_point.size else 0
            before = dataclasses.replace(held, unusual="")
            after = dataclasses.replace(before, index=len(tensors), name=f"{held.name}/next")
            tensors[index] = before
            tensors.append(after)
            operator = dataclasses.replace(operator, outputs=(*operator.outputs, after.index))
            states.append(State(held.name, before, first, index, after.index))
        operators.append(operator)
    if not states:
        return model, []
    inputs = (*model.inputs, *(state.before for state in states if state.before is not None))
    outputs = (*model.outputs, *(state.after for state in states if state.after is not None))
    return dataclasses.replace(
        model, tensors=tuple(tensors), operators=tuple(operators), inputs=inputs, outputs=outputs
    ), states


def _without_handles(model: Model) -> tuple[Model, list[State], Problems]:
    problems, states = Problems(), dict[str, State]()
    if not any(operator.name in KINDS for operator in model.operators):
        return model, [], problems
    tensors, kept = list(model.tensors), list[Operator]()
    handles, same = dict[int, str](), dict[int, int]()
    once, unknown = 0, list[int]()
    for operator in model.operators:
        try:
            if operator.name in KINDS and operator.unusual:
                raise Unsupported(operator.unusual, _KEPT)
            if operator.name == "CALL_ONCE":
                once += 1
                states |= _first_values(model.once[operator.options["subgraph"]])
            elif operator.name == "VAR_HANDLE":
                handles |= _handle(operator)
                for index in operator.outputs:
                    # the input gets the variable's own name
                    tensors[index] = dataclasses.replace(tensors[index], name=f"{tensors[index].name}/handle")
            elif operator.name == "READ_VARIABLE":
                state = _state(states, handles, operator)
                (index,) = operator.outputs
                latest = state.before if state.after is None else state.after
                if latest is not None:
                    same[index] = latest
                else:
                    _check_alike(state, tensors[index], state.first)
                    tensors[index] = dataclasses.replace(tensors[index], name=state.name)
                    state.before = index
            elif operator.name == "ASSIGN_VARIABLE":
                state = _state(states, handles, operator)
                state.after = same.get(operator.inputs[1], operator.inputs[1])
                _check_alike(
                    state, tensors[state.after], state.first if state.before is None else tensors[state.before]
                )
            else:
                inputs = tuple(same.get(index, index) for index in operator.inputs)
                kept.append(dataclasses.replace(operator, inputs=inputs))
        except Unsupported as error:
            problems.found.append(error.at(f"operator {operator.index} {operator.name}"))
            if operator.name == "READ_VARIABLE":
                # as an input, so that the operators that read it are checked too
                unknown += operator.outputs
    lasting = [state for state in states.values() if state.before is not None]
    for state in lasting:
        if state.after is None:
            problems.add(f"variable {state.name!r}", "it is read and never written", "Make it a constant")
    inputs = tuple(state.before for state in lasting if state.before is not None)
    outputs = tuple(same.get(index, index) for index in model.outputs)
    changed = dataclasses.replace(
        model,
        tensors=tuple(tensors),
        operators=tuple(kept),
        inputs=(*model.inputs, *inputs, *unknown),
        outputs=outputs + tuple(state.after for state in lasting if state.after is not None),
        subgraphs=model.subgraphs - once,
    )
    return changed, lasting, problems


def metadata_of(states: list[State], names: Sequence[str]) -> dict[str, Any]:
    """The graph's metadata about its states: input, output and the code that fills the initial value."""
    if not states:
        return {}
    rows = [{"input": names[s.before or 0], "output": names[s.after or 0], "first": s.value} for s in states]
    return {"states": rows}


def _handle(operator: Operator) -> dict[int, str]:
    if len(operator.outputs) != 1:
        raise damaged(f"operator {operator.index} (VAR_HANDLE): {len(operator.outputs)} outputs")
    return {operator.outputs[0]: f"{operator.options['container']}{operator.options['name']}"}


def _state(states: Mapping[str, State], handles: Mapping[int, str], operator: Operator) -> State:
    count = 1 if operator.name == "READ_VARIABLE" else 2
    if len(operator.inputs) != count or len(operator.outputs) != 2 - count:
        raise damaged(f"operator {operator.index} ({operator.name}): {len(operator.inputs)} inputs")
    name = handles.get(operator.inputs[0])
    if name is None:
        raise Unsupported("its variable comes from another operator than VAR_HANDLE", _KEPT)
    if name not in states:
        raise Unsupported(f"no CALL_ONCE sets the initial value of the variable {name!r}", _KEPT)
    return states[name]


def _first_values(model: Model) -> dict[str, State]:
    """The states by name, from the subgraph that runs once, in which each must be a constant of a single code."""
    handles, found = dict[int, str](), dict[str, State]()
    for operator in model.operators:
        if operator.name == "VAR_HANDLE":
            handles |= _handle(operator)
        elif operator.name == "ASSIGN_VARIABLE" and len(operator.inputs) == 2 and operator.inputs[0] in handles:
            name, tensor = handles[operator.inputs[0]], model.tensors[operator.inputs[1]]
            if tensor.span is None:
                raise Unsupported(f"the initial value of {name!r} is no constant", _KEPT)
            values = np.unique(model.array(tensor))
            if values.size != 1:
                raise Unsupported(f"the initial value of {name!r} has several codes", _KEPT)
            found[name] = State(name, tensor, int(values[0]))
        else:
            raise Unsupported(f"{operator.name} in the subgraph that runs once", _KEPT)
    return found


def _check_alike(state: State, tensor: FileTensor, other: FileTensor) -> None:
    """Check that everyone who writes or reads a variable of codes uses the same scale and zero point."""
    alike = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    scales = [t for t in (tensor, other) if t.scale.size]
    if len(scales) == 2:
        alike = (
            alike and np.array_equal(tensor.scale, other.scale) and np.array_equal(tensor.zero_point, other.zero_point)
        )
    if not alike:
        raise Unsupported(
            f"the variable {state.name!r} is {tensor.dtype} {list(tensor.shape)} here and {other.dtype} "
            f"{list(other.shape)}, or has another scale, elsewhere",
            "Give both one quantizer",
        )
