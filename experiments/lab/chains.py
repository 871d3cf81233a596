"""Chains of equal layers under every target: the codes of each layer beside those of a reference target."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import qjax
from qjax.comparison.result import Difference
from qjax.graph.ir import Graph
from qjax.run.stepwise import Runner


class Chain(nnx.Module):
    """`depth` layers of x -> W x, a relu behind each if asked, added to their input if asked. No biases."""

    def __init__(self, depth: int, width: int, relu: bool, residual: bool, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(depth))
        self.relu, self.residual = relu, residual

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            y = nnx.relu(layer(x)) if self.relu else layer(x)
            x = x + y if self.residual else y
        return x


@dataclasses.dataclass(frozen=True)
class Moments:
    """Of a tensor's real values under the chain's own target: the mean, and the mean of the squares."""

    mean: float
    square: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is known of one layer before it is computed under another target.

    right: int [width], r of its multipliers M 2^(-31-r), a right shift behind the product's high word.
    scale: float64 [width], the effective scale s_x s_w / s_y of the product.
    gain: the mean over outputs of sum_k w_k^2 e^2: by how much the product carries on a squared difference of codes,
      in squared steps of its output.
    step_in, step_branch, step_out: the real size of one step of the layer's input, of its product, of its output.
    input, branch, output: the activations there.
    """

    right: np.ndarray
    scale: np.ndarray
    gain: float
    step_in: float
    step_branch: float
    step_out: float
    input: Moments
    branch: Moments
    output: Moments


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """A calibrated chain, converted for its own target.

    reference: all codes of a run of that graph; its inputs are [samples, width].
    """

    graph: qjax.IntegerGraph
    reference: "Codes"
    relu: bool
    residual: bool
    layers: tuple[Layer, ...]


def quantized(
    depth: int, width: int, samples: int, *, relu: bool, residual: bool, powers_of_two: bool = False, seed: int = 0
) -> Quantized:
    """A chain of random weights whose scales come from its own activations, so that every layer uses its range.

    powers_of_two: whether all scales are powers of two (the target is then `fpga`, whose products are one shift).
    """
    model = Chain(depth, width, relu, residual, rngs=nnx.Rngs(seed))
    x = np.asarray(jax.random.normal(jax.random.key(seed + 1), (samples, width)))
    recipe = qjax.Recipe()
    if powers_of_two:
        recipe = qjax.Recipe("fpga", activations=qjax.QSpec(bits=8, symmetric=True), method="tqt", weight_method="tqt")
    qmodel = qjax.quantize(model, recipe, x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x[:2])
    reference = codes_of(graph, graph.quantize(x))
    return Quantized(graph, reference, relu, residual, tuple(_layers(graph.ir, reference, residual)))


def _layers(ir: Graph, codes: "Codes", residual: bool) -> list[Layer]:
    # every chain's effective scales are stated as multipliers, whatever the target of the graph
    whole = qjax.IntegerGraph(ir).retarget("nearest_even").ir
    dots = [node for node in whole.nodes if node.op == "dot"]
    adds = [node for node in whole.nodes if node.op == "add"]
    found: list[Layer] = []
    for index, node in enumerate(dots):
        shift = np.asarray(whole.constant(node, "shift"), np.int64)
        multiplier = np.asarray(whole.constant(node, "multiplier"), np.float64)
        scale = multiplier * 2.0 ** (shift - 31)
        weights = np.asarray(whole.constant(node, "kernel"), np.float64)
        end = adds[index] if residual else node
        found.append(
            Layer(
                right=np.maximum(-shift, 0),
                scale=scale,
                gain=float(np.mean(np.sum(weights**2, axis=0) * scale**2)),
                step_in=_step(whole, node.inputs[0]),
                step_branch=_step(whole, node.output),
                step_out=_step(whole, end.output),
                input=_moments(whole, codes, node.inputs[0]),
                branch=_moments(whole, codes, node.output),
                output=_moments(whole, codes, end.output),
            )
        )
    return found


def _step(ir: Graph, tensor: str) -> float:
    quantization = ir.tensors[tensor].quantization
    assert quantization is not None
    return float(np.asarray(quantization.scale))


def _moments(ir: Graph, codes: "Codes", tensor: str) -> Moments:
    quantization = ir.tensors[tensor].quantization
    assert quantization is not None
    real = (np.asarray(codes[tensor], np.float64) - np.asarray(quantization.zero_point)) * _step(ir, tensor)
    return Moments(float(real.mean()), float(np.mean(real**2)))


@dataclasses.dataclass(frozen=True)
class Drift:
    """A target against the reference.

    share: float [depth], of the codes behind each layer that differ. bias: float [depth], the mean of their
    differences, in steps. arise: of all products of the chain, the codes that differ although the inputs are the
    reference's.
    """

    share: np.ndarray
    bias: np.ndarray
    arise: Difference


Codes = Mapping[str, np.ndarray]
"""Codes by the name of their tensor."""


def codes_of(graph: qjax.IntegerGraph, codes: Any) -> Codes:
    """Every tensor of a run on input codes, node by node, each kernel as the graph's interpreter runs it."""
    ir, runner = graph.ir, Runner(graph.ir, graph.target, graph.interpreter.constants)
    env: dict[str, Any] = dict(zip(ir.inputs, [codes], strict=True))
    for node in ir.nodes:
        env[node.output] = np.asarray(runner.output(node, [env[name] for name in node.inputs]))
    return env


def drift(chain: Quantized, target: str | qjax.targets.Target) -> Drift:
    """The chain under a target, against its own one; both start from the same input codes.

    Raises:
      ValueError: the target cannot take the chain's scales.
    """
    graph, reference = chain.graph.retarget(target), chain.reference
    ir, runner = graph.ir, Runner(graph.ir, graph.target, graph.interpreter.constants)
    found = codes_of(graph, reference[ir.inputs[0]])
    arise = Difference()
    for node in ir.nodes:
        if node.op == "dot":
            own = runner.output(node, [reference[name] for name in node.inputs])
            arise += Difference.of(reference[node.output], np.asarray(own))
    ends = [Difference.of(reference[name], found[name]) for name in ends_of(ir, chain.residual)]
    share = np.array([end.count / end.compared for end in ends])
    return Drift(share, np.array([end.mean for end in ends]), arise)


def ends_of(ir: Graph, residual: bool) -> Sequence[str]:
    """The tensors that leave the layers, in order."""
    return [node.output for node in ir.nodes if node.op == ("add" if residual else "dot")]
