"""A quantized layer written by hand, and PyTorch's: `python -m experiments.forum.by_hand`.

The layer of the post sums products of codes and adds a float bias; its answers are close to PyTorch's and almost never
equal. What is missing is added step by step, until every one of 100,000 outputs is equal.
"""

import argparse
import dataclasses
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.forum import torch_programs
from qjax.numerics import QParams, QSpec, choose_qparams, get_rule, quantize, requantize

ROWS, INPUTS, OUTPUTS = 20_000, 10, 5


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer with its grids, and data for it. x: (ROWS, INPUTS), kernel: codes (INPUTS, OUTPUTS)."""

    x: np.ndarray
    bias: np.ndarray
    kernel: np.ndarray
    kernel_scale: np.float32
    x_params: QParams
    y_params: QParams

    def codes(self) -> np.ndarray:
        """The input's codes, as PyTorch's Quantize makes them."""
        return np.asarray(quantize(self.x, self.x_params, quantization="reciprocal_fma"))

    def accumulators(self) -> np.ndarray:
        """int32 sums of products of codes, each less its zero point."""
        x = self.codes().astype(np.int32) - np.int32(self.x_params.zero_point)
        return x @ self.kernel.astype(np.int32)

    def by_hand(self) -> np.ndarray:
        """The post: sum * quant_scale * fc_scale + bias[j], in Python's floats, put into a float32 tensor."""
        step = float(self.x_params.scale) * float(self.kernel_scale)
        return (self.accumulators() * step + self.bias.astype(np.float64)).astype(np.float32)


def layer(bits: int) -> Layer:
    """Inputs in [0, 1), weights and bias as PyTorch draws them, grids from the least and greatest numbers.

    bits: of the input's codes; 7 is reduce_range, FBGEMM's default.
    """
    rng, bound = np.random.default_rng(0), INPUTS**-0.5
    x = rng.random((ROWS, INPUTS), dtype=np.float32)
    weight = (rng.uniform(-1, 1, (INPUTS, OUTPUTS)) * bound).astype(np.float32)
    bias = (rng.uniform(-1, 1, OUTPUTS) * bound).astype(np.float32)
    y = x.astype(np.float64) @ weight.astype(np.float64) + bias
    unsigned = QSpec(bits=bits, signed=False, symmetric=False)
    w_params = choose_qparams(weight.min(), weight.max(), QSpec(bits=8))
    return Layer(
        x,
        bias,
        np.asarray(quantize(weight, w_params)),
        np.float32(w_params.scale),
        choose_qparams(x.min(), x.max(), unsigned),
        choose_qparams(np.float32(y.min()), np.float32(y.max()), unsigned.replace(bits=8)),
    )


def integers(given: Layer, rule: str) -> np.ndarray:
    """The same layer with qjax: codes uint8. These lines are all that the post's layer lacks."""
    scales = given.x_params.scale, given.kernel_scale, given.y_params.scale
    of_scales = get_rule(rule).of_scales
    assert of_scales is not None
    constants = of_scales(*scales, given.bias, False)
    zero_point = int(given.y_params.zero_point)
    return np.asarray(
        requantize(given.accumulators(), constants, rule=rule, zero_point=zero_point, qmin=0, qmax=255)
    ).astype(np.uint8)


def rounded(given: Layer, *, integer_bias: bool) -> np.ndarray:
    """The layer by hand in doubles, then rounded to the output's grid; the bias in whole steps s_x s_w, or as it is."""
    step = float(given.x_params.scale) * float(given.kernel_scale)
    bias = given.bias.astype(np.float64)
    if integer_bias:
        bias = np.rint(bias / step) * step
    y = given.accumulators() * step + bias
    zero_point = int(given.y_params.zero_point)
    return np.clip(np.rint(y / float(given.y_params.scale)) + zero_point, 0, 255).astype(np.uint8)


def reals(given: Layer, codes: np.ndarray) -> np.ndarray:
    """float32, as DeQuantize gives them."""
    steps = codes.astype(np.float32) - np.float32(given.y_params.zero_point)
    return steps * np.float32(given.y_params.scale)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What PyTorch gave, or qjax in its place. kernel: the codes of its weights after dequantize and quantize."""

    codes: np.ndarray
    reals: np.ndarray
    x: np.ndarray
    kernel: np.ndarray


def answers(layers: dict[str, Layer], emulate: bool) -> tuple[str, dict[str, Answer]]:
    """PyTorch's own answer for every engine, if there is a PyTorch."""
    calls = [
        {
            "program": "linear",
            "engine": engine,
            "x": given.x,
            "x_grid": (float(given.x_params.scale), int(given.x_params.zero_point)),
            "kernel": given.kernel,
            "kernel_scale": float(given.kernel_scale),
            "bias": given.bias,
            "y_grid": (float(given.y_params.scale), int(given.y_params.zero_point)),
        }
        for engine, given in layers.items()
    ]
    found = None if emulate else torch_programs.ask(calls)
    if found is not None:
        return found[0], {engine: Answer(**answer) for engine, answer in zip(layers, found[1], strict=True)}
    emulated = {}
    for engine, given in layers.items():
        codes = integers(given, f"torch_{engine}")
        emulated[engine] = Answer(codes, reals(given, codes), given.codes(), given.kernel)
    return "", emulated


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.forum.by_hand", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="do not look for PyTorch")
    args = parser.parse_args(argv)
    console = Console(width=110)
    layers = {"qnnpack": layer(8), "fbgemm": layer(7)}
    version, found = answers(layers, args.emulate)
    console.print(f"Computed by {version}." if version else "No PyTorch: qjax's rules stand in for it.")

    given, answer = layers["qnnpack"], found["qnnpack"]
    console.print(f"PyTorch output: {answer.reals[0]}")
    console.print(f"Manual output:  {given.by_hand()[0]}", highlight=False)
    total = ROWS * OUTPUTS
    table = Table(title=f"Of {total:,} outputs, how many are not PyTorch's")
    table.add_column("")
    differ: dict[str, list[int]] = {}
    for engine in layers:
        table.add_column(engine, justify="right")
    steps = {
        "as in the post": lambda g, e: g.by_hand() != found[e].reals,
        "rounded to the output's grid": lambda g, e: rounded(g, integer_bias=False) != found[e].codes,
        "the bias rounded to steps of s_x s_w, too": lambda g, e: rounded(g, integer_bias=True) != found[e].codes,
        "requantize, rule torch_qnnpack": lambda g, e: integers(g, "torch_qnnpack") != found[e].codes,
        "requantize, rule torch_fbgemm": lambda g, e: integers(g, "torch_fbgemm") != found[e].codes,
    }
    for name, wrong in steps.items():
        differ[name] = [int(np.sum(wrong(g, engine))) for engine, g in layers.items()]
        table.add_row(name, *(f"{count:,}" for count in differ[name]))
    console.print(table)
    posted, _, _, qnnpack, fbgemm = differ.values()
    gaps = [np.abs(g.by_hand() - found[e].reals).max() / np.float32(g.y_params.scale) for e, g in layers.items()]
    console.print(f"As in the post: at most {max(gaps):.3f} steps of the output's grid away.")

    claims = {
        "the codes of inputs and weights are PyTorch's already": all(
            np.array_equal(g.codes(), found[e].x) and np.array_equal(g.kernel, found[e].kernel)
            for e, g in layers.items()
        ),
        "the layer of the post is PyTorch's before the last rounding: within half a step": all(
            gap < 0.501 for gap in gaps
        )
        and min(posted) > 0.99 * total,
        "qnnpack: rounding to the grid is not enough, for its bias is an integer": differ[
            "rounded to the output's grid"
        ][0]
        > 0,
        "requantize gives all of qnnpack's codes": qnnpack[0] == 0,
        "requantize gives all of FBGEMM's codes": fbgemm[1] == 0,
        "the two engines need rules of their own": qnnpack[1] > 0 and fbgemm[0] > 0,
    }
    for claim, holds in claims.items():
        console.print(f"{'holds ' if holds else 'FAILED'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
