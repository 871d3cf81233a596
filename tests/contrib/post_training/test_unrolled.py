"""Methods that work layer by layer treat each layer of a scan as the same layer outside of one."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.simulated import qparams_of, set_qparams
from qjax.training.weights import parameters
from tests.analysis.models import coarse, data, halves, in_halves

WIDTH, LAYERS = 6, 3
BATCHES = [data(4, 5, 4, seed=seed) for seed in range(2)]
FEW = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1))


class Block(nnx.Module):
    """Two dense layers behind a norm, one with a bias, and a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    """Blocks one after another ("plain"), in a scan over their stacked parameters, or in one that is rematerialised."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.stem, self.head = nnx.Linear(4, WIDTH, rngs=nnx.Rngs(1)), nnx.Linear(WIDTH, 6, rngs=nnx.Rngs(2))
        stack: Any = nnx.vmap(Block)(nnx.Rngs(0).split(LAYERS))
        self.blocks: Any = stack
        if way == "plain":
            parts = [jax.tree.map(lambda a, i=i: a[i], nnx.state(stack)) for i in range(LAYERS)]
            self.blocks = nnx.List([nnx.merge(nnx.graphdef(stack), part) for part in parts])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        if self.way == "plain":
            for block in self.blocks:
                x = block(x)
            return self.head(x)

        def call(block: Any, x: jax.Array) -> jax.Array:
            return block(x)

        step = nnx.remat(call) if self.way == "remat" else call
        return self.head(nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x))


def outside(name: str, layer: int | None) -> str:
    """The name that a quantizer, or a parameter, of a scan has in the plain network."""
    if name == "scan_input":
        return f"blocks/{layer - 1}/add" if layer else "stem"
    if name == "scan_output":
        return f"blocks/{LAYERS - 1}/add"
    return name if layer is None else name.replace("blocks/", f"blocks/{layer}/", 1)


def in_layers(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a scanned network by their names in the plain one."""
    found: dict[str, Any] = {}
    for name, tree in arrays.items():
        if name.startswith(("blocks/", "scan_input")):
            found.update({outside(name, i): jax.tree.map(lambda a, i=i: a[i], tree) for i in range(LAYERS)})
        else:
            found[outside(name, None)] = tree
    return found


def numbers(qmodel: qjax.QuantizedModel) -> dict[str, np.ndarray]:
    """Every parameter and every scale of a network, by its name in the plain one."""
    flat = nnx.to_flat_state(nnx.state(qmodel.model, nnx.Param))
    found: dict[str, Any] = {"/".join(map(str, path)): v[...] for path, v in flat}
    scales: dict[str, Any] = {name: qparams.scale for name, qparams in qmodel.qparams().items()}
    if qmodel.model.way != "plain":  # pyright: ignore[reportAttributeAccessIssue]
        found, scales = in_layers(found), in_layers(scales)
    return {name: np.asarray(a) for name, a in (found | {f"scale of {n}": s for n, s in scales.items()}).items()}


@pytest.fixture(scope="module")
def nets() -> dict[str, qjax.QuantizedModel]:
    """Quantized networks with equal parameters and equal scales."""
    found = {way: qjax.quantize(Net(way), FEW, BATCHES[0]) for way in ("plain", "scan", "remat")}
    plain = found["plain"].qparams()
    for way in ("scan", "remat"):
        for name, q in found[way].plan.quantizers:
            for i in range(LAYERS) if q.stack else [None]:
                part = name if i is None else f"{name}[{i}]"
                set_qparams(found[way], part, plain[outside(name, i)])
                assert np.array_equal(qparams_of(found[way], part).scale, plain[outside(name, i)].scale)
    return found


def after(method: str, qmodel: qjax.QuantizedModel) -> tuple[qjax.QuantizedModel, Any]:
    copy = nnx.clone(qmodel)
    if method == "correct_bias":
        for _, variable in nnx.to_flat_state(nnx.state(copy.model, nnx.Param)):
            variable[...] = variable[...] * np.float32(0.9)
        return copy, qjax.training.correct_bias(copy, BATCHES, reference=qmodel)
    options: dict[str, Any] = {"gptq": {}, "adaround": {"steps": 8}, "brecq": {"steps": 60, "learning_rate": 0.1}}[
        method
    ]
    return copy, getattr(qjax.training, method)(copy, BATCHES, **options)


EVERY = [pytest.param(m, marks=[pytest.mark.exhaustive] if m != "gptq" else []) for m in ("gptq", "adaround", "brecq")]


@pytest.mark.parametrize("method", [*EVERY, pytest.param("correct_bias", marks=pytest.mark.compiled)])
@pytest.mark.sampled(1)
def test_layers_of_a_scan_become_what_they_become_outside_of_it(
    nets: dict[str, qjax.QuantizedModel], method: str
) -> None:
    found = {way: after(method, net) for way, net in nets.items()}
    plain = numbers(found["plain"][0])
    before = numbers(nets["plain"])
    assert any(not np.array_equal(plain[name], before[name]) for name in plain if name.startswith("blocks/1"))
    for way in ("scan", "remat"):
        own = numbers(found[way][0])
        assert own.keys() == plain.keys()
        assert [name for name in plain if not np.array_equal(own[name], plain[name])] == []
        assert found[way][1].left.keys() == (
            set() if method != "correct_bias" else {f"blocks/down/kernel[{i}]" for i in range(LAYERS)}
        )


@pytest.mark.exhaustive
def test_what_was_solved_in_a_scan_is_what_ships(nets: dict[str, qjax.QuantizedModel]) -> None:
    solved, report = after("gptq", nets["scan"])
    names = [layer.name for layer in report.layers]
    assert names[:3] == ["stem/kernel", "blocks/up/kernel[0]", "blocks/down/kernel[0]"]
    assert len(names) == 2 + 2 * LAYERS
    solved.eval()
    graph = qjax.convert(solved, BATCHES[0])
    codes = qjax.training.codes_of(solved, names)
    held = {np.asarray(c.value).tobytes() for c in graph.ir.constants() if c.dtype == "int8"}
    assert all(np.asarray(code, np.int8).tobytes() in held for code in codes.values())


class Nested(nnx.Module):
    """A scan around a reversed one and a loop over time, with stacked outputs and a counter."""

    def __init__(self) -> None:
        self.many = nnx.Param(data(2, 2, 4, 4) / np.float32(2))
        self.time = nnx.Param(data(2, 4, 4) / np.float32(2))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(y: jax.Array, ws: jax.Array) -> Any:
            return nnx.relu(y @ ws), y

        def outer(carry: Any, parts: Any) -> Any:
            y, count = carry
            many, time = parts
            y, seen = lax.scan(layer, y, many, reverse=True)

            def moment(h: jax.Array, t: jax.Array) -> Any:
                return (nnx.relu(t @ time + h),) * 2

            _, steps = lax.scan(moment, jnp.zeros_like(y[:, 0]), y.swapaxes(0, 1))
            return (steps.swapaxes(0, 1), count + 1), seen[0]

        (y, count), stack = lax.scan(outer, (x, jnp.int32(0)), (self.many[...], self.time[...]))
        return y * count.astype(jnp.float32), stack


@pytest.mark.exhaustive
def test_scans_in_scans_and_loops_over_time() -> None:
    model, x = in_halves(Nested()), halves(2, 3, 4)
    qmodel = qjax.quantize(model, coarse(4), x)
    walk = Walk(qmodel, [(x,)])
    assert [item.name for item in walk.items] == [f"many[{i}][{j}]" for i in (0, 1) for j in (1, 0)]
    (found,) = walk.outputs(Stream.of(qmodel, quantized=False), [(x,)])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    ranges = walk.ranges(Stream.of(qmodel), [(x,)])
    assert {name: ends[0].shape for name, ends in ranges.items()} == {
        name: q.stack for name, q in qmodel.plan.quantizers if name not in ("many", "time")
    }


@pytest.mark.parametrize("name", ["blocks/up/kernel[3]", "blocks/up/kernel[0][0][0]", "stem/kernel[x]", "blocks/up[0]"])
def test_a_layer_that_is_not_there(nets: dict[str, qjax.QuantizedModel], name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Expected names of parameters, got {name!r}")):
        parameters(nets["scan"], [name])
