"""UNIDIRECTIONAL_SEQUENCE_LSTM of int8 with an int16 cell, step by step, and SVDF of int8.

Their variables, such as the hidden state, become inputs and outputs of the graph: see `variables`.
"""

import numpy as np

from qjax.contrib.importers.tflite.kernels import SVDF8
from qjax.contrib.importers.tflite.run_kernel import Function
from qjax.contrib.importers.tflite.slices import box_attributes
from qjax.contrib.importers.tflite.values import FLOATS, Codes, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.enums import ACTIVATIONS
from qjax.export.tflite_schema.model import FileTensor, Operator
from qjax.graph.ir import Quantization
from qjax.numerics.lstm import GATE_BITS, UNIT_BITS
from qjax.support.errors import Unsupported

GATES = ("input", "forget", "cell", "output")
MOST_STEPS = 1000
_VARIANTS = {9: "peephole", 10: "peephole", 11: "peephole", 16: "a projection", 20: "layer normalization"}
_PLAIN = "Use an LSTM without it, as tf.keras.layers.LSTM makes"


@reads("UNIDIRECTIONAL_SEQUENCE_LSTM", ignores=("asymmetric", "proj_clip"))
def lstm(walk: Walk, operator: Operator) -> None:
    """A node for the cell and one for the hidden state at each step."""
    _require_plain(walk, operator)
    x, h, c = (walk.codes_of(operator, place) for place in (0, 18, 19))
    major = bool(operator.options["time_major"])
    units = walk.operand(operator, 2).shape[0]
    if len(x.shape) != 3 or len(h.shape) != 2 or h.shape != c.shape or h.shape[1] != units:
        raise bad(operator, f"an input of {x.shape}, states of {h.shape} and {c.shape}")
    batch, steps = (x.shape[1], x.shape[0]) if major else x.shape[:2]
    if h.shape[0] != batch or not 1 <= steps <= MOST_STEPS:
        raise Unsupported(f"{steps} steps of {batch} examples, states of {h.shape[0]}", f"Use 1 to {MOST_STEPS} steps")
    output, grid = walk.result(operator, (*x.shape[:2], units))
    walk.same_grid(operator, h, grid)
    bits = _cell_bits(c)
    _require_hidden(walk, operator, grid)
    attributes = {"cell_bits": bits, "clip": _clip(operator, c)}
    held = {kind: _weights(walk, operator, x, units, gates) for kind, gates in (("cell", (0, 1, 2)), ("hidden", (3,)))}
    after = [walk.output(operator, place) for place in (1, 2)]
    outs: list[Codes] = []
    for step in range(steps):
        now = _step(walk, operator, x, step, 0 if major else 1)
        last = step == steps - 1
        cell = _name_variable(walk, after[1], c) if last else walk.between(f"{output}/cell{step}", c.shape, c)
        walk.node("lstm_cell", [now, h, c], cell.name, attributes, held["cell"])
        hidden = _name_variable(walk, after[0], h) if last else walk.between(f"{output}/hidden{step}", h.shape, h)
        walk.node("lstm_hidden", [now, h, cell], hidden.name, attributes, held["hidden"])
        h, c = hidden, cell
        outs.append(h)
        tables = {"logistic": ("LOGISTIC", GATE_BITS), "tanh": ("TANH", bits)}
        walk.unit_tables[hidden.name] = {role: _function(*of) for role, of in tables.items()}
        walk.unit_tables[cell.name] = {role: _function(of[0], GATE_BITS) for role, of in tables.items()}
    shape = (1, batch, units) if major else (batch, 1, units)
    if steps == 1:
        walk.node("reshape", outs, output, {"shape": list(shape)})
        return
    wide = [walk.reshaped(h, shape, f"{output}/step") for h in outs]
    walk.node("concatenate", wide, output, {"axis": 0 if major else 1})


def _require_plain(walk: Walk, operator: Operator) -> None:
    for place, what in _VARIANTS.items():
        if walk.has(operator, place):
            raise Unsupported(f"an LSTM with {what}", _PLAIN)
    if not walk.has(operator, 1):
        raise Unsupported("an LSTM whose input and forget gates are coupled", _PLAIN)
    activation = operator.options["activation"]
    if not 0 <= activation < len(ACTIVATIONS) or ACTIVATIONS[activation] != "TANH":
        raise Unsupported("an LSTM whose activation is not TANH", _PLAIN)
    if operator.options["diagonal"]:
        raise Unsupported("an LSTM with diagonal recurrent weights", _PLAIN)


def _cell_bits(c: Codes) -> int:
    q = c.quantization
    mantissa, exponent = np.frexp(np.float64(q.scale))
    bits = 1 - int(exponent)
    if c.dtype != "int16" or c.zero_point or mantissa != 0.5 or not 0 <= bits <= UNIT_BITS:
        raise Unsupported(
            f"a cell of {c.dtype} with the scale {q.scale:.6g} and the zero point {c.zero_point}",
            "Its kernels have int16 cells whose scale is a power of two",
        )
    return bits


def _require_hidden(walk: Walk, operator: Operator, grid: Quantization) -> None:
    """LiteRT takes the hidden state's scale from the fifth of the operator's intermediate tensors."""
    if len(operator.intermediates) < 5:
        return
    held = walk.model.tensors[operator.intermediates[4]]
    if held.scale.size and (held.scale[0] != grid.scale or int(held.zero_point[0]) != int(grid.zero_point)):
        raise Unsupported(
            f"its hidden state has the scale {held.scale[0]:.6g}, its output {grid.scale:.6g}",
            "Give both one quantizer",
        )


def _clip(operator: Operator, c: Codes) -> int:
    clip = np.uint32(operator.options["cell_clip"]).view(np.float32)
    if not clip > 0:
        return 0
    found = {int(min(kind(clip) / kind(c.quantization.scale), 32767)) for kind in (np.float32, np.float64)}
    if len(found) > 1:
        raise Unsupported(f"a clip of {clip:.6g}, which the runtimes round differently", "Use another bound")
    return found.pop()


def _weights(walk: Walk, operator: Operator, x: Codes, units: int, gates: tuple[int, ...]) -> dict[str, str]:
    """The constants of some gates, side by side, under new names."""
    kernels = [_matrix(walk, operator, 1 + gate, (units, x.shape[2])) for gate in gates]
    recurrent = [_matrix(walk, operator, 5 + gate, (units, units)) for gate in gates]
    biases = [_bias(walk, operator, 12 + gate, units) for gate in gates]
    found = {
        "kernel": np.concatenate([codes.T for codes, _ in kernels], axis=1),
        "recurrent": np.concatenate([codes.T for codes, _ in recurrent], axis=1),
        "bias": np.concatenate(biases),
        "kernel_scales": np.asarray([scale for _, scale in kernels], np.float32),
        "recurrent_scales": np.asarray([scale for _, scale in recurrent], np.float32),
    }
    name = f"{walk.name_of(operator)}/{'_'.join(GATES[gate] for gate in gates)}"
    return {role: walk.constant(f"{name}/{role}", np.ascontiguousarray(value)) for role, value in found.items()}


def _matrix(walk: Walk, operator: Operator, place: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.float32]:
    tensor = walk.operand(operator, place)
    if tensor.span is None or tensor.dtype != "int8" or tensor.scale.size != 1 or tensor.zero_point.any():
        raise Unsupported(f"its weights {tensor.name!r} are no constant of int8 with one scale", FLOATS)
    if tensor.shape != shape:
        raise bad(operator, f"weights of {tensor.shape}, where {shape} are expected")
    return walk.array(tensor), tensor.scale[0]


def _bias(walk: Walk, operator: Operator, place: int, units: int) -> np.ndarray:
    if not walk.has(operator, place):
        return np.zeros(units, np.int32)
    tensor = walk.operand(operator, place)
    if tensor.span is None or tensor.dtype != "int32" or tensor.size != units:
        raise Unsupported(f"its bias {tensor.name!r} is no constant of int32", FLOATS)
    return walk.array(tensor).reshape(-1)


def _step(walk: Walk, operator: Operator, x: Codes, step: int, axis: int) -> Codes:
    """The input of one step, (batch, in)."""
    name = f"{walk.name_of(operator)}/input"
    flat = tuple(size for a, size in enumerate(x.shape) if a != axis)
    if x.shape[axis] > 1:
        part = walk.between(name, [1 if a == axis else n for a, n in enumerate(x.shape)], x)
        walk.node("slice", [x], part.name, box_attributes(x, {axis: (step, step + 1)}))
        x = part
    return walk.reshaped(x, flat, name)


def _name_variable(walk: Walk, tensor: FileTensor, of: Codes) -> Codes:
    """The tensor that a variable becomes."""
    return Codes(walk.add(tensor, of.shape, of.quantization), of.shape, of.dtype, of.grid)


def _function(operator: str, bits: int) -> Function:
    ends = -(2**15), 2**15 - 1
    zero = np.asarray(0, np.int32)
    grids = (Quantization(np.asarray(2.0**-n, np.float32), zero, *ends) for n in (bits, UNIT_BITS))
    return Function(operator, {}, "int16", *grids)


@reads("SVDF", ignores=("asymmetric",))
def svdf(walk: Walk, operator: Operator) -> None:
    """Features of the frame, which push the oldest ones out of the state, and the weighted sum of the state."""
    x, state = walk.codes_of(operator, 0), walk.codes_of(operator, 4)
    feature, time = walk.operand(operator, 1), walk.operand(operator, 2)
    rank = operator.options["rank"]
    if len(feature.shape) != 2 or len(time.shape) != 2 or rank < 1 or feature.shape[0] % rank:
        raise bad(operator, f"weights of {feature.shape} and {time.shape} for the rank {rank}")
    filters, memory = time.shape
    if feature.shape != (filters, x.shape[-1]) or len(x.shape) != 2 or state.shape != (x.shape[0], filters * memory):
        raise bad(operator, f"an input of {x.shape}, a state of {state.shape}, weights of {feature.shape}")
    if x.dtype != "int8" or state.dtype not in ("int8", "int16") or (state.dtype == "int16" and state.zero_point):
        raise Unsupported(f"an input of {x.dtype} with a state of {state.dtype}", "Its kernels have int8 and int16")
    if ACTIVATIONS[operator.options["activation"]] != "RELU":
        raise Unsupported("an SVDF whose activation is not RELU", "Its kernels of integers have RELU only")
    units = filters // rank
    name, _ = walk.result(operator, (x.shape[0], units))
    if walk.output(operator).dtype != "int8":
        raise Unsupported(f"a result of {walk.output(operator).dtype}", "Its kernels have int8")
    if state.dtype == "int8":
        walk.marks[name] = SVDF8
    codes, scale = _matrix(walk, operator, 1, (filters, x.shape[1]))
    constants = {"kernel": np.ascontiguousarray(codes.T), "scale": np.asarray(scale, np.float32)}
    held = {role: walk.constant(f"{name}/feature_{role}", value) for role, value in constants.items()}
    made = walk.between(f"{name}/feature", (x.shape[0], filters), state)
    walk.node("svdf_feature", [x], made.name, {}, held)
    frames = walk.reshaped(made, (*made.shape, 1), f"{name}/newest")
    if memory > 1:
        before = walk.reshaped(state, (x.shape[0], filters, memory), f"{name}/state")
        kept = walk.between(f"{name}/kept", (x.shape[0], filters, memory - 1), state)
        walk.node("slice", [before], kept.name, box_attributes(before, {2: (1, memory)}))
        both = walk.between(f"{name}/frames", before.shape, state)
        walk.node("concatenate", [kept, frames], both.name, {"axis": 2})
        frames = both
    after = _name_variable(walk, walk.output(operator, 1), state)
    walk.node("reshape", [frames], after.name, {"shape": list(state.shape)})
    if time.span is None or time.dtype != state.dtype or time.scale.size != 1 or time.zero_point.any():
        raise Unsupported(f"its weights {time.name!r} are no constant of {state.dtype} with one scale", FLOATS)
    constants = {
        "kernel": np.ascontiguousarray(walk.array(time).reshape(units, rank * memory)),
        "bias": _bias(walk, operator, 3, units),
        "scale": np.asarray(time.scale[0], np.float32),
    }
    held = {role: walk.constant(f"{name}/time_{role}", value) for role, value in constants.items()}
    walk.node("svdf_time", [frames], name, {}, held)
