"""One 8-bit layer as a trainer computes it on a machine, against its integers: the counts of trainer_precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.lab import precision_theory as theory
from experiments.lab.machines import FLOAT32, MACHINES, Machine
from qjax.contrib.lab.study import Settings
from qjax.numerics import QParams, QSpec, effective_scale, fake_quant, fake_quant_codes, quantize, requantize

TERMS = (16, 64, 256, 1024, 4096)
"""K, the number of products in a sum."""
WEIGHTS = 1.3
"""Standard deviation of weights; inputs have 1. Not a power of two, for then both operands had the same errors."""
WAYS = ("classic", "integer-valued")
SYMMETRIC = QSpec(bits=8)


def rows(settings: Settings) -> int:
    """Rows and columns of a product on the machines whose sums are float32."""
    return 2048 if settings.full else 1024


def rows_in_order(settings: Settings) -> int:
    """The same where sums run in order."""
    return 512 if settings.full else 256


def scales(terms: int) -> tuple[np.float32, np.float32, np.float32]:
    """s_x, s_w, s_y: of normal inputs and weights and their products' sums."""
    each, out = theory.CLIP / theory.GRID, theory.OUTPUT_CLIP / theory.GRID
    return np.float32(each), np.float32(WEIGHTS * each), np.float32(WEIGHTS * out * terms**0.5)


def operands(seed: int, terms: int, size: int) -> tuple[jax.Array, jax.Array]:
    """float32 x [size, terms] and w [terms, size], normal."""
    first, second = jax.random.split(jax.random.fold_in(jax.random.key(seed), terms))
    return jax.random.normal(first, (size, terms)), WEIGHTS * jax.random.normal(second, (terms, size))


@functools.partial(jax.jit, static_argnums=(2, 3))
def outputs(x: jax.Array, w: jax.Array, machine: Machine, way: str) -> jax.Array:
    """Output codes int8 [m, n] of the trained forward on a machine.

    way: "classic" multiplies fake-quantized values; "integer-valued" multiplies their codes as floats and scales the
      sum, as qjax does.
    """
    s_x, s_w, s_y = scales(x.shape[1])
    if way == "classic":
        y = machine.dot(fake_quant(x, _params(s_x)), fake_quant(w, _params(s_w)))
    else:
        y = machine.dot(_codes(x, s_x), _codes(w, s_w)) * (s_x * s_w)
    return quantize(y, _params(s_y))


@jax.jit
def integers(x: jax.Array, w: jax.Array) -> jax.Array:
    """Output codes int8 [m, n] of the integers: an int32 sum, requantized once with ties to even."""
    s_x, s_w, s_y = scales(x.shape[1])
    a, b = (_codes(value, scale).astype(jnp.int8) for value, scale in ((x, s_x), (w, s_w)))
    acc = lax.dot(a, b, preferred_element_type=jnp.int32)
    codes = requantize(acc, effective_scale(s_x, s_w, s_y), qmin=SYMMETRIC.qmin, qmax=SYMMETRIC.qmax)
    return codes.astype(jnp.int8)


def _params(scale: np.float32) -> QParams:
    return QParams(jnp.asarray(scale), jnp.zeros((), jnp.int32), SYMMETRIC)


def _codes(x: jax.Array, scale: np.float32) -> jax.Array:
    return fake_quant_codes(x, scale, np.int32(0), SYMMETRIC.qmin, SYMMETRIC.qmax)


def first_inexact_bits(machine: Machine, symmetric: bool = True) -> int:
    """The least bits of a tensor some of whose codes, less their zero point, the machine cannot hold; 17: none."""
    integers_up = jnp.arange(2**16, dtype=jnp.int32).astype(jnp.float32)
    held = np.asarray(machine.operand(integers_up) == integers_up)
    for bits in range(2, 17):
        spec = QSpec(bits=bits, symmetric=symmetric)
        reach = spec.qmax if symmetric else spec.qmax - spec.qmin
        if not held[: reach + 1].all():
            return bits
    return 17


def first_inexact_terms(limit: int = 1100) -> int:
    """The least K for which the float32 sum of K products 127 * 127 is not the integer."""
    exact = lax.dot(
        jnp.tril(jnp.full((limit, limit), theory.GRID, jnp.int8)),
        jnp.full((limit, 1), theory.GRID, jnp.int8),
        preferred_element_type=jnp.int32,
    )
    lower = jnp.tril(jnp.full((limit, limit), theory.GRID, jnp.float32))
    found = FLOAT32.dot(lower, jnp.full((limit, 1), theory.GRID, jnp.float32))
    wrong = np.flatnonzero(np.asarray(found).astype(np.int64) != np.asarray(exact))
    return int(wrong[0]) + 1 if wrong.size else limit + 1


class Shares:
    """Counts: (way, machine) -> per K, the codes that differ from the integers', of how many."""

    def __init__(self, settings: Settings) -> None:
        self.wrong: dict[tuple[str, str], list[int]] = {(w, m.name): [] for w in WAYS for m in MACHINES}
        self.codes: dict[str, int] = {}
        self.parted = 0
        """Codes in which the integer-valued way gives different codes on machines whose sums are float32."""
        for terms in TERMS:
            self._count(settings, terms)

    def _count(self, settings: Settings, terms: int) -> None:
        x, w = operands(settings.seed, terms, rows(settings))
        exact = np.asarray(integers(x, w))
        few = rows_in_order(settings)
        alike: list[np.ndarray] = []
        for machine in MACHINES:
            size = rows(settings) if machine.sum_bits is None else few
            self.codes[machine.name] = size * size
            for way in WAYS:
                found = np.asarray(outputs(x[:size], w[:, :size], machine, way))
                self.wrong[way, machine.name].append(int(np.sum(found != exact[:size, :size])))
                if way == "integer-valued" and machine.sum_bits is None:
                    alike.append(found)
        self.parted += sum(int(np.sum(other != alike[0])) for other in alike[1:])

    def share(self, way: str, machine: Machine, terms: int | None = None) -> float:
        """Of all K, or of one."""
        counts = self.wrong[way, machine.name]
        if terms is None:
            return sum(counts) / (len(TERMS) * self.codes[machine.name])
        return counts[TERMS.index(terms)] / self.codes[machine.name]
