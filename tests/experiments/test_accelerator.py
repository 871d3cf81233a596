"""The made-up accelerator: its register and its rounding against Python's integers, and the whole run in little."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qjax
from experiments import accelerator
from qjax import ops
from qjax.graph.kernels import attributes, prepare

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def optax_promotion():
    """optax mixes dtypes; the library's own strictness is tested elsewhere."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def register_of(xs: list[int], ws: list[int]) -> int:
    """Four products at a time, in unbounded integers."""
    acc = 0
    for start in range(0, len(xs), accelerator.LANES):
        acc += sum(x * w for x, w in zip(xs[start : start + 4], ws[start : start + 4], strict=True))
        acc = min(max(acc, accelerator.LOW), accelerator.HIGH)
    return acc


@pytest.mark.parametrize("depth", [1, 4, 30, 144])
def test_the_register(depth: int) -> None:
    limit = accelerator.WEIGHT_LIMIT
    x = RNG.integers(-255, 256, (12, depth)).astype(np.int32)
    w = RNG.integers(-limit, limit + 1, (depth, 7)).astype(np.int32)
    # all of one sign, then of the other: the register stays at its end until they turn
    x[0], x[1, : depth // 2], x[1, depth // 2 :] = 255, 255, -255
    w[:, 0], w[:, 1] = limit, -limit
    got = np.asarray(jax.jit(accelerator.register)(x, w))
    wanted = [[register_of(row.tolist(), column.tolist()) for column in w.T] for row in x]
    assert np.array_equal(got, wanted)
    if depth == 144:
        assert np.any(np.asarray(wanted) != x.astype(np.int64) @ w)


def codes_of(node: Any, constants: Any, x: Any, residual: Any) -> np.ndarray:
    """A convolution (and addition) of the device in Python's integers."""
    members = ops.backend.members_of(node)
    conv = members["product"]
    kernel = np.asarray(constants["product/kernel"]).astype(int)
    (top, bottom), (left, right) = conv.attributes["padding"]
    down, across = conv.attributes["strides"]
    zero = int(constants["zero_point0"])
    padded = np.pad(x.astype(int) - zero, ((0, 0), (top, bottom), (left, right), (0, 0)))
    _, height, width, features = (size or 0 for size in conv.shape)
    out = np.zeros((x.shape[0], height, width, features), int)
    bounds = [int(value) for role, value in constants.items() if role.endswith("clamp_min")]
    low = max([node["qmin"], *bounds])
    for index in np.ndindex(*out.shape):
        n, i, j, f = index
        window = padded[n, i * down : i * down + kernel.shape[0], j * across : j * across + kernel.shape[1]]
        acc = register_of(window.ravel().tolist(), kernel[..., f].ravel().tolist())
        value = (acc + int(constants["bias"][f])) * int(constants["multiplier"][f])
        shift = int(np.broadcast_to(constants["shift"], (features,))[f])
        if residual is not None:
            other = int(residual[index]) - int(constants["residual_zero_point"])
            value += other * int(np.broadcast_to(constants["residual_multiplier"], (features,))[f])
        code = (value >> shift) + int(constants["y_zero_point"])
        out[index] = min(max(code, low), node["qmax"])
    return out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_experiment_in_little(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs it, then computes its graph's convolutions once more in Python's integers."""
    results, graph, images = accelerator.run(["--quick"])
    printed = capsys.readouterr().out
    assert results.exact_outputs_that_differ == 0
    assert results.exact_outputs == 64 * 10
    assert results.differ_before > 0
    assert results.first_divergence is not None
    assert "mac4's kernel conv_add_relu" in printed
    assert {node.op for node in graph.ir.nodes} == {"backend", "window_sum", "reshape"}
    constants = prepare(graph.ir)
    codes = {graph.ir.inputs[0]: graph.quantize(images[:2])}
    for node in graph.ir.nodes:
        inputs = [codes[name] for name in node.inputs]
        facts = attributes(graph.ir, node)
        own = {role: np.asarray(value) for role, value in constants[node.name].items()}
        got = codes[node.output] = np.asarray(ops.get(node.op).kernel(facts, own, [jnp.asarray(c) for c in inputs]))
        if node.op == "backend" and len(got.shape) == 4:
            residual = np.asarray(inputs[1]) if len(inputs) == 2 else None
            assert np.array_equal(got, codes_of(facts, own, np.asarray(inputs[0]), residual)), node.name
    assert np.array_equal(codes[graph.ir.outputs[0]], np.asarray(graph.run(codes[graph.ir.inputs[0]])))
    # multipliers of 8 bits, a bias of 16
    for node in graph.ir.nodes:
        if node.op == "backend":
            own = constants[node.name]
            assert int(np.max(own["multiplier"])) <= 256
            assert int(np.max(np.abs(own["bias"]))) <= accelerator.BIAS_LIMIT


def test_what_it_cannot_do_is_refused() -> None:
    from flax import nnx

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3), jnp.float32)
    qmodel = qjax.quantize(model, qjax.Recipe(weights=qjax.QSpec(bits=9, axis=-1)), x)
    with pytest.raises(qjax.ConversionError, match=r"backend 'mac4' has no pattern for .*\(dot\)"):
        qjax.convert(qmodel, x, target=accelerator.MAC4)
