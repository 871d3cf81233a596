"""A step of an LSTM on codes, read from files of other tools: the next cell, and the next hidden state.

A step is two nodes, because a node has one result. See `numerics.lstm` for the methods.
"""

from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import lstm
from qjax.numerics._namespace import wide
from qjax.numerics.fixed_point import (
    Multiplier,
    effective_scale,
    quantize_multiplier,
    rounding_divide_by_power_of_two,
)
from qjax.numerics.requantize import requantize
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.softfloat import Real
from qjax.ops import accumulate
from qjax.ops.accumulator_bounds import span
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Op,
    Preparation,
    Prepared,
    Role,
    Shape,
    Site,
    centered,
    register,
)
from qjax.ops.epilogue import finish_sum, fold_sum
from qjax.ops.facts import always
from qjax.ops.fields import Natural
from qjax.support.errors import Unsupported

_LOW, _HIGH = np.int32(-(2**15)), np.int32(2**15 - 1)
_GATE = 2.0**-lstm.GATE_BITS
_ROWS = (((1,), (0,)), ((), ()))
_KEPT = ("kernel", "recurrent", "bias")


class PreparedFields(TypedDict):
    """method: see `numerics.lstm`. rounding: of the exact one."""

    method: str
    rounding: NotRequired[str]


class Fields(TypedDict):
    """cell_bits: the cell's scale is 2^-cell_bits. clip: the limit of the cell's magnitude, 0 for none."""

    cell_bits: Natural
    clip: Natural


class _Step(Op):
    """What both nodes share: the inputs x (batch, in), h (batch, out) and c (batch, out), and gates from one kernel.

    constants: kernel (in, gates * out), recurrent (out, gates * out) and bias hold all gates side by side. A quantized
    graph also has kernel_scales and recurrent_scales (gates,), and logistic and tanh if a runtime has its own tables.
    """

    fields = Fields
    prepared = PreparedFields
    role = Role.PRODUCER
    takes_steps = False
    keeps_batch = always
    keeps = _KEPT

    def prepare(self, given: Preparation) -> Prepared:
        method, held = given.target.lstm, given.constants
        if method is None:
            raise Unsupported(
                f"an LSTM has a kernel of its own under {given.target.name!r}, which qjax does not reproduce",
                "Use another target",
            )
        constants: dict[str, Any] = {role: held[role] for role in _KEPT}
        gates = np.shape(held["kernel_scales"])[0]
        units = np.shape(held["bias"])[0] // gates
        scales = [np.repeat(np.asarray(held[f"{role}_scales"], np.float32), units) for role in ("kernel", "recurrent")]
        pairs = list(zip(("x", "h"), given.inputs[:2], scales, strict=True))
        attributes: dict[str, Any] = {"method": method}
        if method == "exact":
            attributes["rounding"] = given.target.rounding.value
            constants |= fold_sum([Real.of(x.scale) * Real.of(scale) for _, x, scale in pairs], _GATE, given.affine)
        else:
            for name, x, scale in pairs:
                # The product of the scales is rounded to float32; the gate's scale is a power of two.
                found = quantize_multiplier(effective_scale(scale, np.float32(x.scale), np.float32(_GATE), form="f32"))
                constants |= {f"{name}_multiplier": found.multiplier, f"{name}_shift": found.shift}
        constants |= self._functions(given, method)
        return Prepared(constants | self._products(given, method), attributes)

    def restated(self, given: Preparation) -> Prepared | None:
        if "kernel_scales" not in given.constants:
            raise Unsupported("the scales of an LSTM's weights are not in the graph", "Read the file again")
        return self.prepare(given)

    def _functions(self, given: Preparation, method: str) -> dict[str, Any]:
        raise NotImplementedError

    def _products(self, given: Preparation, method: str) -> dict[str, Any]:
        raise NotImplementedError

    def arithmetic(self, attributes: Attributes) -> str:
        return f"LSTM of {attributes['method']}, functions as tables of 65536 codes"

    def accumulator(self, site: Site) -> Bounds | None:
        bias = np.asarray(site.constants["bias"], np.int64)
        bounds: list[Bounds] = []
        for role, x, offset in zip(("kernel", "recurrent"), site.inputs[:2], (bias, 0 * bias), strict=True):
            w, (low, high) = np.asarray(site.constants[role], np.int64), span(x)
            least = w.clip(min=0).sum(0) * low + w.clip(max=0).sum(0) * high + offset
            most = w.clip(min=0).sum(0) * high + w.clip(max=0).sum(0) * low + offset
            bounds.append((int(least.min()), int(most.max())))
        return min(low for low, _ in bounds), max(high for _, high in bounds)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[1], [1], ()]

    def _gates(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        """The gates before their functions: int32 (batch, gates * out), within int16."""
        x, h = (
            accumulate.dot(centered(inputs[i], constants, i).astype(jnp.int32), jnp.asarray(constants[role]), _ROWS)
            for i, role in enumerate(("kernel", "recurrent"))
        )
        x = x + jnp.reshape(jnp.asarray(constants["bias"]), (1, -1))
        if attributes["method"] == "exact":
            known = {**constants, "y_zero_point": np.int32(0)}
            known = {role: value for role, value in known.items() if role not in ("clamp_min", "clamp_max")}
            ends = {"qmin": int(_LOW), "qmax": int(_HIGH), "dtype": "int32", "rounding": attributes["rounding"]}
            return finish_sum([x, h], known, ends)
        first, second = (_multiplied(acc, constants, name) for acc, name in ((x, "x"), (h, "h")))
        first = _clipped(first)
        return _clipped(first + (second if attributes["method"] == "tflite" else _clipped(second)))


@register
class LstmCell(_Step):
    """The next cell state, computed from the gates of input, forget and cell.

    constants: the tables `logistic` and `tanh`, int16 (65536,).
    """

    name = "lstm_cell"

    def _functions(self, given: Preparation, method: str) -> dict[str, Any]:
        return {name: _table(given, method, name, lstm.GATE_BITS) for name in ("logistic", "tanh")}

    def _products(self, given: Preparation, method: str) -> dict[str, Any]:
        if method != "tflite_micro":
            return {}
        found = quantize_multiplier(Real.of(2.0**-lstm.UNIT_BITS))
        other = quantize_multiplier(Real.of(2.0 ** (given.attributes["cell_bits"] - 2 * lstm.UNIT_BITS)))
        names = (("forget", found), ("input", other))
        return {f"{name}_{role}": value for name, m in names for role, value in m._asdict().items()}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        gates = self._gates(attributes, constants, inputs)
        c, bits, method = inputs[2].astype(jnp.int32), attributes["cell_bits"], attributes["method"]
        units = c.shape[1]
        admitted, kept = (_looked_up(constants["logistic"], gates[:, i * units : (i + 1) * units]) for i in (0, 1))
        found = _looked_up(constants["tanh"], gates[:, 2 * units :])
        back = 2 * lstm.UNIT_BITS - bits
        if method == "exact":
            with wide(jnp):
                total = (kept.astype(jnp.int64) * c.astype(jnp.int64)) << np.int64(lstm.UNIT_BITS - bits)
                total = total + admitted.astype(jnp.int64) * found.astype(jnp.int64)
                total = right_shift_with_headroom(jnp, total, np.int64(back), Rounding(attributes["rounding"]))
                total = jnp.clip(total, np.int64(_LOW), np.int64(_HIGH)).astype(jnp.int32)
        elif method == "tflite":
            total = rounding_divide_by_power_of_two(kept * c, lstm.UNIT_BITS)
            total = _clipped(total + rounding_divide_by_power_of_two(admitted * found, back))
        else:
            first = _clipped(_multiplied(kept * c, constants, "forget"))
            total = _clipped(first + _clipped(_multiplied(admitted * found, constants, "input")))
        clip = np.int32(attributes["clip"])
        total = jnp.clip(total, -clip, clip) if clip else total
        return total.astype(attributes["dtype"])


@register
class LstmHidden(_Step):
    """The next hidden state, computed from the next cell state and the output gate.

    constants: the tables `logistic` and `tanh`, int16 (65536,).
    """

    name = "lstm_hidden"

    def _functions(self, given: Preparation, method: str) -> dict[str, Any]:
        bits = (("logistic", lstm.GATE_BITS), ("tanh", given.attributes["cell_bits"]))
        return {name: _table(given, method, name, own) for name, own in bits}

    def _products(self, given: Preparation, method: str) -> dict[str, Any]:
        step = Real.of(2.0 ** (-2 * lstm.UNIT_BITS))
        if method == "exact":
            return {
                f"hidden_{role}": value for role, value in fold_sum([step], given.output.scale, given.affine).items()
            }
        scale: Any = step / Real.of(np.float32(given.output.scale))
        scale = Real.of(scale.to_float32()) if method == "tflite" else scale
        return {f"hidden_{role}": value for role, value in quantize_multiplier(scale)._asdict().items()}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        gate = _looked_up(constants["logistic"], self._gates(attributes, constants, inputs))
        product = gate * _looked_up(constants["tanh"], inputs[2].astype(jnp.int32))
        if attributes["method"] == "exact":
            known = {role.removeprefix("hidden_"): value for role, value in constants.items() if "hidden_" in role}
            return finish_sum([product], {**known, "y_zero_point": constants["y_zero_point"]}, attributes)
        codes = _multiplied(product, constants, "hidden") + jnp.asarray(constants["y_zero_point"])
        low, high = np.int32(attributes["qmin"]), np.int32(attributes["qmax"])
        return jnp.clip(codes, low, high).astype(attributes["dtype"])


def _table(given: Preparation, method: str, function: str, bits: int) -> np.ndarray:
    if method == "exact":
        return lstm.exact_table(function, bits)
    if method == "tflite":
        if not 9 <= bits <= lstm.UNIT_BITS:
            raise Unsupported(f"a cell of scale 2^-{bits}, for which LiteRT has no tanh", "Calibrate again")
        return lstm.gemmlowp_table(function, bits)
    if function not in given.constants:
        raise Unsupported(
            f"an LSTM under {given.target.name!r} needs the runtime's own tables, which the graph does not have",
            f"Read the file again with target={given.target.name!r}",
        )
    return np.asarray(given.constants[function])


def _multiplied(acc: jax.Array, constants: Constants, name: str) -> jax.Array:
    """MultiplyByQuantizedMultiplier, int32."""
    m = Multiplier(jnp.asarray(constants[f"{name}_multiplier"]), jnp.asarray(constants[f"{name}_shift"]))
    return requantize(acc, m, rule="double_round", qmin=-(2**31), qmax=2**31 - 1).astype(jnp.int32)


def _clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, _LOW, _HIGH)


def _looked_up(table: Any, codes: jax.Array) -> jax.Array:
    return jnp.take(jnp.asarray(table), codes - _LOW, axis=0, mode="clip").astype(jnp.int32)
