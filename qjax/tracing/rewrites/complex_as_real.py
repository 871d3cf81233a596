"""Rewrites complex numbers as pairs of real ones, and Fourier transforms as products with constant matrices.

    (a + i b) * (c + i d)    ->    a c - b d  and  a d + b c
    fft(x)                   ->    x @ cos(2 pi j k / n)  and  -x @ sin(2 pi j k / n)

Rotations by complex numbers, diagonal state spaces and Fourier mixing compute with complex numbers, but a graph has
real codes only. A complex tensor that depends on data becomes two real tensors. Complex parameters stay, because their
real and imaginary parts are constants. An equation without a rule stays as well; it becomes an error that names the
line.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from qjax.ops import products
from qjax.tracing.composite import composite
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined

LONGEST = 4096
"""Longest axis of a Fourier transform; its matrix has the square of it."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """re + i im; None means zeros, and at most one is None."""

    re: Any
    im: Any


Rule = Callable[..., Pair]
"""(equation, *operands) -> result, where a real operand is a pair without an imaginary part."""


def write_pairs(program: Program) -> Program:
    """Replace each complex tensor that depends on data by two real ones, bodies included."""
    if not any(_is_complex(value) for eqn in program.walk() for value in (*eqn.inputs, *eqn.outputs)):
        return program
    writer = _Writer()
    for eqn in program.equations:
        writer.write(eqn)
    # a complex result of the model is assembled again, so that the error about it can tell what to return
    outputs = tuple(writer.whole(value, program.equations[-1]) for value in program.outputs)
    return dataclasses.replace(program, outputs=outputs, equations=tuple(writer.equations))


class _Writer:
    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self._pairs: dict[Value, Pair] = {}
        self._wholes: dict[Value, Value] = {}
        """Replacements of values: complex numbers assembled from pairs, and parts of pairs."""

    def write(self, eqn: Equation) -> None:
        """Add an equation or its replacement."""
        rule = _RULES.get(eqn.primitive)
        plain = not any(map(_is_complex, (*eqn.inputs, *eqn.outputs))) or all(eqn.fixed)
        if eqn.body is not None and not all(eqn.fixed):
            self._write_body(eqn, eqn.body)
            return
        if plain or rule is None or not _has_rule(eqn):
            self.equations.append(self._keep_equation(eqn))
            return
        operands = [self._pair(value, eqn) for value in eqn.inputs]
        given = [part for pair in operands for part in (pair.re, pair.im) if part is not None]
        found: list[Pair] = []

        def function(*parts: Any) -> list[Any]:
            left = iter(parts)
            pairs = [Pair(*(None if part is None else next(left) for part in (p.re, p.im))) for p in operands]
            found[:] = [rule(eqn, *pairs)]
            return [part for part in (found[0].re, found[0].im) if part is not None]

        (output,) = eqn.outputs
        equations, results = inlined(function, given, None, eqn)
        self.equations += equations
        if not _is_complex(output):
            (self._wholes[output],) = results
            return
        left = iter(results)
        self._pairs[output] = Pair(*(None if part is None else next(left) for part in (found[0].re, found[0].im)))

    def _write_body(self, eqn: Equation, body: Program) -> None:
        """A scan or remat: each complex input or output that depends on data becomes two."""
        consts, carry = int(eqn.params.get("num_consts", 0)), int(eqn.params.get("num_carry", 0))
        carries = range(consts, consts + carry)
        inside = _Writer()
        outer: list[Value] = []
        inner: list[Value] = []
        counts = [0, 0, 0]
        for index, (value, own) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
            kind = 0 if index < consts else 1 if index in carries else 2
            if _is_complex(value) and (kind == 1 or not (value.fixed or value.constant is not None)):
                outer += self._parts(value, eqn)
                parts = _halves(own)
                inside._pairs[own] = Pair(*parts)
                inner += parts
            else:
                outer.append(self.whole(value, eqn))
                inner.append(own)
            counts[kind] = len(outer) - sum(counts[:kind])
        for own in body.equations:
            inside.write(own)
        results: list[Value] = []
        outputs: list[Value] = []
        carried = 0
        for index, (value, own) in enumerate(zip(eqn.outputs, body.outputs, strict=True)):
            if _is_complex(value):
                results += inside._parts(own, eqn)
                parts = _halves(value)
                self._pairs[value] = Pair(*parts)
                outputs += parts
            else:
                results.append(inside.whole(own, eqn))
                outputs.append(value)
            carried = len(outputs) if index < carry else carried
        params = {**eqn.params, "num_consts": counts[0], "num_carry": carried} if eqn.is_scan else eqn.params
        body = dataclasses.replace(body, inputs=tuple(inner), outputs=tuple(results), equations=tuple(inside.equations))
        self.equations.append(
            dataclasses.replace(eqn, inputs=tuple(outer), outputs=tuple(outputs), params=params, body=body)
        )

    def _parts(self, value: Value, eqn: Equation) -> list[Value]:
        """Both parts of a complex value."""
        pair = self._pair(value, eqn)
        if pair.re is not None and pair.im is not None:
            return [pair.re, pair.im]
        equations, (zeros,) = inlined(jnp.zeros_like, [_any(pair)], None, eqn)
        self.equations += equations
        return [zeros if part is None else part for part in (pair.re, pair.im)]

    def _keep_equation(self, eqn: Equation) -> Equation:
        """An equation without a rule: its complex operands are assembled inside it, so that an error names it."""
        inputs = tuple(self._wholes.get(value, value) for value in eqn.inputs)
        pairs = [self._pairs[value] for value in dict.fromkeys(inputs) if value in self._pairs]
        if not pairs:
            same = all(a is b for a, b in zip(inputs, eqn.inputs, strict=True))
            return eqn if same else dataclasses.replace(eqn, inputs=inputs)
        group = _Writer()
        group._pairs = self._pairs
        own = dataclasses.replace(eqn, inputs=tuple(group.whole(value, eqn) for value in inputs))
        parts = [part for pair in pairs for part in (pair.re, pair.im) if part is not None]
        others = [value for value in inputs if value not in self._pairs and value.constant is None]
        read = tuple(dict.fromkeys([*parts, *others]))
        return composite(eqn.primitive, [*group.equations, own], read, eqn.outputs, eqn.params)

    def whole(self, value: Value, eqn: Equation) -> Value:
        """A complex value, assembled again if it was a pair."""
        if value in self._pairs and value not in self._wholes:
            equations, (self._wholes[value],) = inlined(lax.complex, self._parts(value, eqn), None, eqn)
            self.equations += equations
        return self._wholes.get(value, value)

    def _pair(self, value: Value, eqn: Equation) -> Pair:
        value = value if value in self._pairs else self._wholes.get(value, value)
        if not _is_complex(value):
            return Pair(value, None)
        if value not in self._pairs:
            if value.constant is not None and not isinstance(value.constant, Tracer):
                number = np.asarray(value.constant)
                parts = [Value(value.shape, part.dtype, part) for part in (number.real.copy(), number.imag.copy())]
                self._pairs[value] = Pair(
                    parts[0] if number.real.any() or not number.imag.any() else None,
                    parts[1] if number.imag.any() else None,
                )
            else:
                equations, parts = inlined(lambda x: [lax.real(x), lax.imag(x)], [value], None, eqn)
                self.equations += equations
                self._pairs[value] = Pair(*parts)
        return self._pairs[value]


def _is_complex(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.complexfloating))


def _halves(value: Value) -> list[Value]:
    """New values for both parts of a complex one."""
    return [Value(value.shape, jnp.finfo(value.dtype).dtype) for _ in range(2)]


def _any(x: Pair) -> Any:
    return x.im if x.re is None else x.re


def _or_zeros(part: Any, x: Pair) -> Any:
    return jnp.zeros_like(_any(x)) if part is None else part


# ---------------------------------------------------------------------------- rules


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _minus(a: Any, b: Any) -> Any:
    return a if b is None else -b if a is None else a - b


def _times(multiply: Callable[[Any, Any], Any], x: Pair, y: Pair) -> Pair:
    """The product for any bilinear function."""

    def product(a: Any, b: Any) -> Any:
        return None if a is None or b is None else multiply(a, b)

    re = _minus(product(x.re, y.re), product(x.im, y.im))
    return Pair(re, _plus(product(x.re, y.im), product(x.im, y.re)))


def _each(eqn: Equation, *operands: Pair) -> Pair:
    """Apply a function that moves or sums elements to the real parts and to the imaginary ones."""
    numbers = [x for value, x in zip(eqn.inputs, operands, strict=True) if _is_complex(value)]

    def of(part: Callable[[Pair], Any]) -> Any:
        if all(part(x) is None for x in numbers):
            return None
        given = [
            _or_zeros(part(x), x) if _is_complex(value) else x.re for value, x in zip(eqn.inputs, operands, strict=True)
        ]
        return eqn.bind(*given)[0]

    return Pair(of(lambda x: x.re), of(lambda x: x.im))


def _cast(eqn: Equation, x: Pair) -> Pair:
    dtype = jnp.finfo(eqn.out_dtypes[0]).dtype if _is_complex(eqn.outputs[0]) else eqn.out_dtypes[0]

    def to(part: Any) -> Any:
        return part if part is None or part.dtype == dtype else lax.convert_element_type(part, dtype)

    return Pair(to(x.re), to(x.im)) if _is_complex(eqn.outputs[0]) else Pair(to(_or_zeros(x.re, x)), None)


def _quotient(eqn: Equation, x: Pair, y: Pair) -> Pair:
    if y.im is None:
        return Pair(*(None if part is None else part / y.re for part in (x.re, x.im)))
    length = _plus(None if y.re is None else y.re * y.re, y.im * y.im)
    return _times(lax.mul, x, Pair(None if y.re is None else y.re / length, -y.im / length))


def _dot(eqn: Equation, x: Pair, y: Pair) -> Pair:
    numbers, precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    return _times(lambda a, b: products.dot_general(a, b, numbers, a.dtype, precision), x, y)


def _power(eqn: Equation, x: Pair) -> Pair:
    result = x
    for _ in range(int(eqn.params.get("y", 2)) - 1):
        result = _times(lax.mul, result, x)
    return result


def _length(eqn: Equation, x: Pair) -> Pair:
    if x.re is None or x.im is None:
        return Pair(jnp.abs(_any(x)), None)
    return Pair(jnp.sqrt(x.re * x.re + x.im * x.im), None)


def _exponential(eqn: Equation, x: Pair) -> Pair:
    if x.im is None:
        return Pair(jnp.exp(x.re), None)
    turned = Pair(jnp.cos(x.im), jnp.sin(x.im))
    return turned if x.re is None else _times(lax.mul, Pair(jnp.exp(x.re), None), turned)


def _conjugate(eqn: Equation, x: Pair) -> Pair:
    return Pair(x.re, None if x.im is None else -x.im)


def _imaginary(eqn: Equation, x: Pair) -> Pair:
    return Pair(_or_zeros(x.im, x), None)


# ---------------------------------------------------------------------------- Fourier transforms


def _waves(rows: int, columns: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of 2 pi j k / length, reduced to one period in integers; float32 [rows, columns]."""
    angle = 2 * np.pi * (np.outer(np.arange(rows), np.arange(columns)) % length) / length
    # a sine of pi must be 0 and not 1e-16, which is what float64 computes
    return np.round(np.cos(angle), 15).astype(np.float32), np.round(np.sin(angle), 15).astype(np.float32)


def _multiply_axis(x: Any, matrix: np.ndarray, axis: int) -> Any:
    """The product of an axis with a constant matrix; None if there is nothing to add."""
    if x is None or not matrix.any():
        return None
    y = products.dot_general(x, jnp.asarray(matrix, x.dtype), (((axis,), (0,)), ((), ())), x.dtype)
    return jnp.moveaxis(y, -1, axis)


def _transformed(x: Pair, axis: int, length: int, columns: int, sign: int) -> Pair:
    """sum over j of x_j exp(sign 2 pi i j k / length) along an axis, for k < columns."""
    cos, sin = _waves(_any(x).shape[axis], columns, length)
    sin = np.float32(sign) * sin
    re = _minus(_multiply_axis(x.re, cos, axis), _multiply_axis(x.im, sin, axis))
    return Pair(re, _plus(_multiply_axis(x.re, sin, axis), _multiply_axis(x.im, cos, axis)))


def _scaled(x: Pair, count: int) -> Pair:
    return Pair(*(None if part is None else part * np.asarray(1 / count, part.dtype) for part in (x.re, x.im)))


def _fourier(eqn: Equation, x: Pair) -> Pair:
    """`lax.fft` by its definition: FFT, its inverse, and both for real numbers, over the last axes."""
    lengths = eqn.params["fft_lengths"]
    kind, count = _kind(eqn), len(lengths)
    first = _any(x).ndim - count
    if kind == "FFT" or kind == "IFFT":
        for axis, length in enumerate(lengths, first):
            x = _transformed(x, axis, length, length, -1 if kind == "FFT" else 1)
        return x if kind == "FFT" else _scaled(x, math.prod(lengths))
    last, half = _any(x).ndim - 1, lengths[-1] // 2 + 1
    others = list(enumerate(lengths[:-1], first))
    if kind == "RFFT":
        x = _transformed(x, last, lengths[-1], half, -1)
        for axis, length in others:
            x = _transformed(x, axis, length, length, -1)
        return x
    for axis, length in others:
        x = _transformed(x, axis, length, length, 1)
    cos, sin = _waves(half, lengths[-1], lengths[-1])
    # every frequency counts twice, except the first, and the last of an even number
    twice = np.where((np.arange(half) * 2) % lengths[-1] == 0, 1, 2).astype(np.float32)[:, None]
    real = _minus(_multiply_axis(x.re, cos * twice, last), _multiply_axis(x.im, sin * twice, last))
    shape = (*_any(x).shape[:-1], lengths[-1])
    real = jnp.zeros(shape, _any(x).dtype) if real is None else real
    return _scaled(Pair(real, None), math.prod(lengths))


def _kind(eqn: Equation) -> str:
    kind = eqn.params["fft_type"]
    return getattr(kind, "name", str(kind))


def _has_rule(eqn: Equation) -> bool:
    """Whether the equation's parameters are among those that its rule knows."""
    if eqn.primitive == "fft":
        known = _kind(eqn) in ("FFT", "IFFT", "RFFT", "IRFFT")
        return known and bool(eqn.params["fft_lengths"]) and max(eqn.params["fft_lengths"]) <= LONGEST
    if eqn.primitive == "integer_pow":
        return 2 <= int(eqn.params["y"]) <= 4
    if eqn.primitive == "convert_element_type":
        return eqn.inputs[0].is_float or _is_complex(eqn.inputs[0]) or _is_complex(eqn.outputs[0])
    return True


_MOVES = """broadcast_in_dim concatenate copy cumsum dynamic_slice expand_dims gather neg pad reduce_sum reshape rev
select_n slice squeeze stack stop_gradient tile transpose""".split()  # noqa: SIM905

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_MOVES, _each),
    "abs": _length,
    "add": lambda eqn, x, y: Pair(_plus(x.re, y.re), _plus(x.im, y.im)),
    "add_any": lambda eqn, x, y: Pair(_plus(x.re, y.re), _plus(x.im, y.im)),
    "complex": lambda eqn, re, im: Pair(re.re, im.re),
    "conj": _conjugate,
    "convert_element_type": _cast,
    "div": _quotient,
    "dot_general": _dot,
    "exp": _exponential,
    "fft": _fourier,
    "imag": _imaginary,
    "integer_pow": _power,
    "mul": lambda eqn, x, y: _times(lax.mul, x, y),
    "real": lambda eqn, x: Pair(_or_zeros(x.re, x), None),
    "square": _power,
    "sub": lambda eqn, x, y: Pair(_minus(x.re, y.re), _minus(x.im, y.im)),
}
"""Rules for primitives on complex numbers. `_power`: a square has no parameter y."""

COMPLEX = frozenset({"complex", "conj", "fft", "imag", "real"})
"""Primitives that exist for complex numbers only."""
