"""-119 or -120: the accumulator 585 of tensorflow#102943: `python -m experiments.forum.x585`.

A layer of an int8 network could not be repeated by hand: M0 = 1527099593, shift 6 and zero point -126 make -119
of the accumulator 585, TFLite made -120. Every kernel of LiteRT gets that accumulator, as the bias of zero weights, and
its neighbours too.
"""

import argparse
import dataclasses
import sys
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance import single
from conformance.case import Case, Grid, Runtime
from conformance.runtimes.litert import LiteRT
from conformance.runtimes.tflite_micro import TFLiteMicro
from qjax import targets
from qjax.numerics import effective_scale, get_rule, quantize_multiplier, requantize

S_X, S_W, S_Y = (np.float32(s) for s in (0.05296124517917633, 0.024093778803944588, 0.11484327912330627))
ZERO_POINT, ACCUMULATOR = -126, 585
ACCUMULATORS = np.arange(-180, 22_770, dtype=np.int32)
"""Their codes run from -128 to 127, so that nothing is clamped."""
RULES = ("single_round", "double_round", "neon", "nearest_even", "nearest_away", "float64_away", "float32")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One set of kernels, and qjax's target for it."""

    name: str
    runtime: Runtime
    target: str


KERNELS = (
    Kernels("LiteRT, reference", LiteRT("reference"), "tflite_reference"),
    Kernels("LiteRT, optimised", LiteRT("optimized"), "tflite_optimized_x86"),
    Kernels("LiteRT, XNNPACK", LiteRT("xnnpack"), "tflite_xnnpack"),
    Kernels("TFLite Micro", TFLiteMicro(), "tflite_micro"),
)


def case_of(op: str) -> Case:
    """Zero weights, and every accumulator as the bias of a channel of its own."""

    def grid(scale: np.float32, zero_point: int = 0) -> Grid:
        return Grid(np.asarray(scale), zero_point, "int8")

    channels = ACCUMULATORS.size
    if op == "fully_connected":
        shape, window, known = (1, 4), (4, channels), {}
    else:
        shape, window = (1, 1, 1, 4), (1, 1, 4, channels)
        known = {"strides": (1, 1), "padding": "VALID"}
    return Case(
        op,
        (np.zeros(shape, np.int8),),
        (grid(S_X),),
        grid(S_Y, ZERO_POINT),
        kernel=np.zeros(window, np.int8),
        kernel_grid=grid(S_W),
        bias=ACCUMULATORS,
        attributes=known,
    )


def exact_codes() -> np.ndarray:
    """acc * s_x * s_w / s_y in rationals, to nearest even, plus the zero point."""
    e = exact_scale()
    return np.array([round(acc * e) + ZERO_POINT for acc in ACCUMULATORS.tolist()])


def exact_scale() -> Fraction:
    return Fraction(float(S_X)) * Fraction(float(S_W)) / Fraction(float(S_Y))


def table_of_rules(console: Console) -> dict[str, bool]:
    """585 under every rule, with the scale of doubles and the one that begins with a float32 product."""
    table = Table(title=f"The accumulator {ACCUMULATOR} under rules of requantization")
    for name in ("rule", "s_x * s_w in doubles", "s_x * s_w rounded to float32"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    acc, found = np.array([ACCUMULATOR], np.int32), {}
    for rule in RULES:
        for form in ("f64", "f32"):
            constants = get_rule(rule).prepare(effective_scale(S_X, S_W, S_Y, form=form))
            found[rule, form] = int(np.asarray(requantize(acc, constants, rule=rule, zero_point=ZERO_POINT))[0])
        table.add_row(rule, str(found[rule, "f64"]), str(found[rule, "f32"]))
    console.print(table)
    seen = {key for key, code in found.items() if code == -120}
    return {"only float32 products, with a scale that begins with one, make -120": seen == {("float32", "f32")}}


def float32_steps(console: Console) -> dict[str, bool]:
    """The two roundings that turn the product into a tie."""
    product = S_X * S_W
    e = product / S_Y
    value = np.float32(ACCUMULATOR) * e
    unrounded = ACCUMULATOR * Fraction(float(e))
    exact = exact_scale()
    console.print(f"exactly          585 * {float(exact):.15f} = {float(585 * exact):.10f}, to nearest   7: -119")
    console.print(f"XNNPACK, e =     585 * {float(e):.15f} = {float(unrounded):.10f}")
    console.print(f"         float32({float(unrounded):.10f})         = {float(value):.10f}, to even      6: -120")
    return {
        "585 * e lies above 6.5 in real numbers, with either scale": 585 * exact > Fraction(13, 2) < unrounded,
        "as a float32 number it is 6.5": bool(value == np.float32(6.5)),
        "e is 1 / 90 but for 8e-8 of it, so every odd multiple of 45 comes near a tie": abs(90 * exact - 1) < 8e-8,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.x585", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for LiteRT and TFLite Micro")
    args = parser.parse_args(argv)
    console = Console(width=110, highlight=False)
    m = quantize_multiplier(effective_scale(S_X, S_W, S_Y))
    console.print(f"M0 = {int(m.multiplier)}, shift {-int(m.shift)}")

    table = Table(title=f"{ACCUMULATORS.size:,} accumulators, codes from -128 to 127")
    for name in ("kernels", "operation", "585", "not the nearest code", "qjax differs", "computed by"):
        table.add_column(name, justify="left" if name in ("kernels", "operation", "computed by") else "right")
    exact, where = exact_codes(), int(np.argmax(ACCUMULATORS == ACCUMULATOR))
    mismatches, codes, living = 0, {}, False
    for kernels in KERNELS:
        for op, label in (("conv2d", "CONV_2D"), ("fully_connected", "FULLY_CONNECTED")):
            case = case_of(op)
            found = ours = single.run(case, targets.get(kernels.target)).reshape(-1).astype(np.int64)
            source, differ = "qjax", ""
            if not args.emulate:
                try:
                    found, source = kernels.runtime.run(case).reshape(-1).astype(np.int64), kernels.runtime.version()
                    differ, living = f"{np.sum(found != ours):,}", True
                except ImportError:
                    pass
            mismatches += int(np.sum(found != ours))
            codes[kernels.target, op] = found
            table.add_row(kernels.name, label, str(found[where]), f"{np.sum(found != exact):,}", differ or "-", source)
    console.print(table)
    claims = table_of_rules(console)
    claims |= float32_steps(console)

    moved = ACCUMULATORS[codes["tflite_xnnpack", "conv2d"] != exact]
    ties = ACCUMULATORS[ACCUMULATORS % 90 == 45]
    console.print(f"XNNPACK misses the nearest code at {', '.join(map(str, moved[:6]))}, ... {moved[-1]}.")
    made = {name: {int(c[where]) for (target, _), c in codes.items() if target == name} for name, _ in codes}
    claims |= {
        "XNNPACK, the default, makes -120; all other kernels make -119": made.pop("tflite_xnnpack") == {-120}
        and all(found == {-119} for found in made.values()),
        "XNNPACK's differ from the nearest code at odd multiples of 45 only": bool(np.all(np.isin(moved, ties))),
        **({"qjax's targets give the codes of every kernel": mismatches == 0} if living else {}),
    }
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
