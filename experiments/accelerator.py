"""A made-up accelerator, from the graph to training for it: `python -m experiments.accelerator`.

The device, "mac4", is small and rounds in its own way:

- weights of 8 bits meet codes of 4 bits minus their zero point, four products a cycle, along (row, column, channel);
  the sum of the four is exact and is added to a register of 14 bits that saturates;
- the bias, of 16 bits, is added to the finished register;
- a multiplier of 8 bits and one shift make a code of it; the bits that are shifted out are dropped, not rounded;
- convolution, residual addition and relu are one instruction: register and residual are each multiplied, added, and
  shifted once, so that nothing is rounded in between.

No target of qjax has such a register, so the device brings its own kernels. The rest of the network (an average pool, a
reshape) follows its target, which rounds once, ties up.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import qjax
from experiments.data import Digits, digits
from experiments.models import ResNet
from experiments.training import Schedule, accuracy, one_hot, scores, train
from qjax.contrib.lab.machine import machine
from qjax.export import Backend, Fusion, op, tensor
from qjax.numerics import Real, effective_scale, quantize_multiplier

WEIGHT_BITS, ACTIVATION_BITS, REGISTER_BITS = 8, 4, 14
WEIGHT_LIMIT = 2 ** (WEIGHT_BITS - 1) - 1
LOW, HIGH = -(2 ** (REGISTER_BITS - 1)), 2 ** (REGISTER_BITS - 1) - 1
LANES = 4
BIAS_LIMIT = 2**15 - 1

# ---------------------------------------------------------------------------- the arithmetic


def register(x: jax.Array, w: jax.Array) -> jax.Array:
    """int32 (N, K) and (K, F) -> (N, F): four products at a time, the register saturating after each four."""
    missing = -x.shape[1] % LANES
    x, w = jnp.pad(x, ((0, 0), (0, missing))), jnp.pad(w, ((0, missing), (0, 0)))
    xs = x.T.reshape(-1, LANES, x.shape[0])
    ws = w.reshape(-1, LANES, w.shape[1])

    def cycle(acc: jax.Array, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        a, b = operands
        for lane in range(LANES):
            acc = acc + a[lane][:, None] * b[lane][None, :]
        return jnp.clip(acc, LOW, HIGH), None

    return lax.scan(cycle, jnp.zeros((x.shape[0], w.shape[1]), jnp.int32), (xs, ws))[0]


def columns(x: jax.Array, attributes: Any) -> tuple[jax.Array, tuple[int, ...]]:
    """int32 NHWC, zero at the zero point -> (N, K) with K along (row, column, channel), and the shape of N."""
    x = jnp.pad(x, ((0, 0), *attributes["padding"], (0, 0)))
    rows, cols = attributes["window"]
    down, right = attributes["strides"]
    height, width = (x.shape[1] - rows) // down + 1, (x.shape[2] - cols) // right + 1
    taps = [
        x[:, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]
        for i in range(rows)
        for j in range(cols)
    ]
    found = jnp.concatenate(taps, axis=-1)
    return found.reshape(-1, found.shape[-1]), found.shape[:3]


def products(member: qjax.ops.Member, codes: jax.Array) -> jax.Array:
    """What a convolution or a dense layer leaves in the registers, in the shape of its result."""
    x = codes.astype(jnp.int32) - member.constants["zero_point0"]
    w = jnp.asarray(member.constants["kernel"]).astype(jnp.int32)
    if member.op == "dot":
        return register(x, w)
    x, shape = columns(x, {**member.attributes, "window": w.shape[:2]})
    return register(x, w.reshape(-1, w.shape[-1])).reshape(*shape, -1)


def finish(total: jax.Array, member: qjax.ops.Member, node: qjax.ops.Fused) -> jax.Array:
    """One shift that drops the low bits; zero point, range, relu."""
    shift = jnp.broadcast_to(node.constants["shift"], total.shape)
    codes = (total >> shift) + node.zero_point
    assert node.qmin is not None
    low = jnp.maximum(member.constants.get("clamp_min", node.qmin), node.qmin)
    return jnp.clip(codes, low, node.qmax).astype(node.dtype)


def mac(inputs: Sequence[jax.Array], node: qjax.ops.Fused) -> jax.Array:
    """A convolution or a dense layer, with its relu if it has one."""
    (member,) = node.members.values()
    total = (products(member, inputs[0]) + node.constants["bias"]) * node.constants["multiplier"]
    return finish(total, member, node)


def mac_add(inputs: Sequence[jax.Array], node: qjax.ops.Fused) -> jax.Array:
    """Convolution, residual addition and relu, shifted once."""
    x, residual = inputs
    total = (products(node["product"], x) + node.constants["bias"]) * node.constants["multiplier"]
    other = residual.astype(jnp.int32) - node.constants["residual_zero_point"]
    return finish(total + other * node.constants["residual_multiplier"], node["add"], node)


# ---------------------------------------------------------------------------- scales in, integers out


def prepare(match: qjax.export.Match) -> dict[str, Any]:
    """Multipliers of 8 bits that share a shift per channel, and the bias of 16 bits."""
    product, y = match["product"], match.output.quantization
    x = product.inputs[0].quantization
    ratios = {"multiplier": effective_scale(x.scale, product.weight_scale, y.scale)}
    made: dict[str, Any] = {"bias": jnp.clip(product.constants["bias"], -BIAS_LIMIT, BIAS_LIMIT)}
    if "residual" in match:
        residual = match["residual"].quantization
        ratios["residual_multiplier"] = Real.of(residual.scale) / Real.of(y.scale)
        made["residual_zero_point"] = residual.zero_point
    # a ratio e is below 2^exponent: e * 2^(8 - exponent) has 8 bits
    exponents = [jnp.asarray(quantize_multiplier(e).shift) for e in ratios.values()]
    largest = exponents[0] if len(exponents) == 1 else jnp.maximum(*jnp.broadcast_arrays(*exponents))
    made["shift"] = jnp.clip(8 - largest, 1, 30)
    for role, ratio in ratios.items():
        made[role] = ratio.scale_by_power_of_two(made["shift"]).to_int32()
    return made


def is_supported(node: qjax.export.NodeView) -> bool:
    """What the device's loops can walk through: narrow weights, NHWC without groups or dilation, or a plain matrix."""
    kernel = node.constant_tensors.get("kernel")
    if kernel is None or kernel.quantization is None or kernel.quantization.qmax > WEIGHT_LIMIT:
        return False
    known = node.attributes
    if node.op == "dot":
        return len(kernel.shape) == len(node.inputs[0].shape) == 2 and known["rhs_contracting"] == [0]
    layouts = (known["lhs_layout"], known["rhs_layout"], known["out_layout"])
    plain = layouts == ([0, 3, 1, 2], [3, 2, 0, 1], [0, 3, 1, 2])
    return plain and known["groups"] == 1 and known["lhs_dilation"] == known["rhs_dilation"] == [1, 1]


CORE = qjax.targets.Target(
    "mac4_core",
    "single_round",
    rounding=qjax.numerics.Rounding.NEAREST_UP,
    description="what the made-up accelerator mac4 computes outside of its array: one rounding, ties up",
)

CONV = op("conv", tensor("x"), name="product", where=is_supported, relu=False)
MAC4 = Backend(
    "mac4",
    CORE,
    [
        Fusion("conv_add_relu", op("add", CONV, tensor("residual"), name="add", relu=True), mac_add, prepare),
        Fusion("mac", op(("conv", "dot"), tensor("x"), name="product", where=is_supported), mac, prepare),
    ],
    others=("window_sum", "reshape"),
)

# ---------------------------------------------------------------------------- the experiment


@dataclasses.dataclass
class Results:
    """Counts and accuracies over the test images; `exact_outputs_that_differ` compares training forward and graph."""

    float_accuracy: float = 0.0
    fake_quant: float = 0.0
    plain_graph: float = 0.0
    device_before: float = 0.0
    device_after: float = 0.0
    differ_before: int = 0
    differ_after: int = 0
    compared: int = 0
    first_divergence: str | None = None
    exact_outputs: int = 0
    exact_outputs_that_differ: int = 0


def quantized(data: Digits, args: argparse.Namespace, results: Results) -> qjax.QuantizedModel:
    """Trained in floats, then with narrow activations, without a thought of the device."""
    model = ResNet(args.width, rngs=nnx.Rngs(args.seed))
    targets, test = one_hot(data.train_labels), (data.test_images, data.test_labels)
    train(model, data.train_images, targets, Schedule(args.epochs), seed=args.seed, title="float training")
    results.float_accuracy = accuracy(scores(model, test[0]), test[1])
    activations = qjax.QSpec(bits=ACTIVATION_BITS, symmetric=False)
    recipe = qjax.Recipe(target=CORE, weights=qjax.QSpec(bits=WEIGHT_BITS, axis=-1), activations=activations)
    qmodel = qjax.quantize(model, recipe, data.train_images[:16])
    qjax.calibrate(qmodel, [data.train_images[:512]])
    schedule = Schedule(max(1, args.epochs // 3), learning_rate=1e-3)
    train(qmodel, data.train_images, targets, schedule, seed=args.seed + 1, title=f"W{WEIGHT_BITS}A{ACTIVATION_BITS}")
    results.fake_quant = accuracy(scores(qmodel, test[0]), test[1])
    return qmodel


def run(argv: list[str] | None = None) -> tuple[Results, qjax.IntegerGraph, np.ndarray]:
    """The figures, the device's graph after training, and the test images."""
    parser = argparse.ArgumentParser(prog="python -m experiments.accelerator", description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="of the float training; a third of it quantized")
    parser.add_argument("--steps", type=int, default=60, help="training steps through the device's integers")
    parser.add_argument("--images", type=int, default=500, help="how many of the test images")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one epoch, 4 channels, 3 steps: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.epochs, args.steps, args.images, args.width = 1, 3, 64, 4
    start, data, results = time.perf_counter(), digits(), Results()
    images, labels = data.test_images[: args.images], data.test_labels[: args.images]
    data = dataclasses.replace(data, test_images=images, test_labels=labels)
    sample = data.train_images[:16]
    qmodel = quantized(data, args, results)

    plain, device = qjax.convert(qmodel, sample), qjax.convert(qmodel, sample, target=MAC4)
    print("The graph of the model:", plain, "", "For the device:", device, "", sep="\n")
    results.plain_graph = accuracy(plain(images), labels)
    results.device_before = accuracy(device(images), labels)
    checked = images[:200]
    report = qjax.compare(plain, device, checked)
    results.first_divergence = report.first.name if report.first is not None else None
    print("Where the device parts from the plain graph, and why:", report, "", sep="\n")
    before = qjax.verify(device, qmodel, [checked])
    results.compared, results.differ_before = before.compared, before.local
    print("The trained forward against the device:", before, "", sep="\n")

    forward = qjax.exact(qmodel, sample, target=MAC4)
    batch = 32
    rows = np.random.default_rng(args.seed + 2).permutation(len(data.train_images))
    rows = np.resize(rows, args.steps * batch)
    train(
        qmodel,
        data.train_images[rows],
        one_hot(data.train_labels[rows]),
        Schedule(1, learning_rate=2e-3, batch_size=batch),
        seed=args.seed + 3,
        forward=forward,
        title="through the device's integers",
    )
    device = qjax.convert(qmodel, sample, target=MAC4)
    shipped = np.asarray(device(images))
    results.device_after = accuracy(shipped, labels)
    after = qjax.verify(device, qmodel, [checked])
    results.differ_after = after.local
    results.exact_outputs = shipped.size
    results.exact_outputs_that_differ = int(np.sum(np.asarray(scores(qmodel, images, forward)) != shipped))
    print(f"After {args.steps} steps through the device's integers:", after, "", sep="\n")
    print(
        f"accuracy on {len(labels)} test images: float {results.float_accuracy:.3f}, trained as "
        f"W{WEIGHT_BITS}A{ACTIVATION_BITS} {results.fake_quant:.3f}, as plain integers {results.plain_graph:.3f},\n"
        f"on the device {results.device_before:.3f}, on the device after {args.steps} steps through its integers "
        f"{results.device_after:.3f};\ncodes in which a node of the device differs from the trained forward, given the "
        f"same input codes: {results.differ_before:,} of {results.compared:,} before, {results.differ_after:,} after;\n"
        f"outputs in which the exact forward and the device's graph differ: {results.exact_outputs_that_differ} of "
        f"{results.exact_outputs:,}; {time.perf_counter() - start:.0f} s on {machine()}"
    )
    return results, device, images


def main(argv: list[str] | None = None) -> Results:
    return run(argv)[0]


if __name__ == "__main__":
    main()
