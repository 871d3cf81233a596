"""`convert(state=...)` and `graph.step`: the state stays codes, in the graph and in every artifact."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import functools
import math
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax

import qjax
from qjax.export.emit.c.files import FLAGS
from qjax.export.emit.stablehlo import to_bytes
from qjax.runtimes.comparing import against_runtimes
from tests.test_cached_decoding import LENGTH, SIZE, call, converted, empty, text

N, PLACES, WIDTH = 2, 5, 8
X = jax.random.normal(jax.random.key(0), (PLACES, N, 1, WIDTH))


class Attention(nnx.Module):
    """Flax's own attention with the cache that it holds itself."""

    def __init__(self) -> None:
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=nnx.Rngs(0))
        self.attention.init_cache((N, PLACES, WIDTH))

    def __call__(self, x):
        return x + self.attention(x)


class Recurrent(nnx.Module):
    """Flax's own GRU cell; its state comes last, and goes out in a dict."""

    def __init__(self) -> None:
        self.cell = nnx.GRUCell(WIDTH, 6, rngs=nnx.Rngs(0))

    def __call__(self, x, scale, h):
        h, y = self.cell(h, x * scale)
        return {"y": nnx.relu(y), "h": h}


@functools.cache
def cached(bits: int = 8):
    model = qjax.stateful(Attention(), nnx.Cache)
    spec = qjax.QSpec(bits=bits, symmetric=False)
    recipe = qjax.Recipe(overrides={"input/0/.*": qjax.Override(activations=spec)})
    state, batches = model.state(), []
    for x in X:
        batches.append((state, x))
        _, state = model(state, x)
    qmodel = qjax.quantize(model, recipe, batches[0])
    qjax.calibrate(qmodel, batches)
    qmodel.eval()
    return model, qjax.convert(qmodel, batches[0], state="state")


@functools.cache
def recurrent():
    x, h = jax.random.normal(jax.random.key(1), (4, 3, WIDTH)), jnp.zeros((3, 6))
    ones = jnp.linspace(0.5, 1, 3)[:, None]
    model, batches = Recurrent(), []
    for row in x:
        batches.append((row, ones, h))
        h = model(*batches[-1])["h"]
    qmodel = qjax.quantize(model, qjax.Recipe(), batches[0])
    qjax.calibrate(qmodel, batches)
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, batches[0], state="h"), batches


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_steps_are_calls_whose_cache_stays_codes(bits: int, tmp_path) -> None:
    model, graph = cached(bits)
    graph.save(tmp_path / "model.qjax")
    loaded = qjax.load(tmp_path / "model.qjax")
    floats, codes, others = model.state(), graph.state(batch=N), loaded.state(model.state())
    same(codes, others)
    assert codes["attention"]["cached_key"].dtype == np.int8
    rows = []
    for x in X:
        wanted, floats = graph(floats, x)
        found, codes = graph.step(codes, x)
        other, others = loaded.step(others, x)
        same(found, wanted)
        same(other, wanted)
        same(codes, others)
        rows.append(found)
    same(codes, graph.state(floats))
    keys = np.asarray(codes["attention"]["cached_key"])
    assert len(np.unique(keys)) > 4
    assert -(2 ** (bits - 1)) <= keys.min()
    assert keys.max() < 2 ** (bits - 1)

    def step(state, x):
        output, state = graph.step(state, x)
        return state, output

    last, outputs = jax.jit(lambda state, x: lax.scan(step, state, x))(graph.state(batch=N), X)
    same(last, codes)
    same(outputs, jnp.stack(rows))


@pytest.mark.exhaustive
def test_a_state_that_is_computed_anew_gets_its_own_grid_again() -> None:
    qmodel, graph, batches = recurrent()
    grids = [graph.ir.tensors[name].quantization for name in (graph.ir.inputs[-1], graph.ir.outputs[0])]
    assert np.array_equal(grids[0].scale, grids[1].scale)
    assert graph.ir.outputs[0] == "input/2/next"
    assert qjax.verify(graph, qmodel, batches).exact
    forward = nnx.jit(qjax.exact(qmodel, batches[0], state="h"))
    floats, codes = batches[0][2], graph.state(batches[0][2])
    for x, ones, _ in batches:
        wanted = forward(qmodel, x, ones, floats)
        floats = wanted["h"]
        found, codes = graph.step(codes, x, ones)
        same(found, {"y": wanted["y"]})
        same(codes, graph.state(floats))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_text_at_once_and_token_by_token_give_the_same_codes() -> None:
    _, whole, one = converted()
    tokens = text(3, seed=5)
    logits, after = whole.step(whole.state(batch=3), *call(tokens, 0))
    state = one.state(batch=3)
    for place in range(LENGTH):
        found, state = one.step(state, *call(tokens[:, place : place + 1], place))
        same(found[:, 0], logits[:, place])
    same(state, after)
    # the graph of a text fills the cache, that of one token goes on
    _, state = one.step(after, *call(tokens[:, :1], LENGTH))
    assert not np.array_equal(state["keys"], after["keys"])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bad_positions_are_refused_and_read_the_nearest_row_in_files() -> None:
    _, _, graph = converted()
    state = graph.state(batch=N)
    with pytest.raises(ValueError, match=f"expected integers from 0 to {SIZE - 1}, got {SIZE} to {SIZE}"):
        graph.step(state, *call(text(length=1), SIZE))
    with pytest.raises(ValueError, match="1 indices are out of range"):
        graph.step(state, jnp.asarray([[3], [99]], jnp.int32), call(text(length=1), 1)[1])
    codes = [np.asarray(x) for x in graph.quantize(*call(text(length=1), 0), empty())]
    far = [codes[0], np.full_like(codes[1], 10_000), *codes[2:]]
    last = [codes[0], np.full_like(codes[1], SIZE - 1), *codes[2:]]
    same(graph.run(*far), graph.run(*last))
    no_file_differs(graph, far, graph.run(*last))


def test_a_full_cache_overwrites_its_last_row_in_every_artifact() -> None:
    """As `lax.dynamic_update_slice` does in the model itself."""
    model, graph = cached()
    full = {"attention": {**model.state()["attention"], "cache_index": jnp.asarray(PLACES, jnp.int32)}}
    _, after = model(full, X[0])
    (_, state), kept = graph.step(graph.state(full), X[0]), graph.state(full)
    changed = np.any(np.asarray(state["attention"]["cached_key"] != kept["attention"]["cached_key"]), axis=(0, 2, 3))
    assert changed.tolist() == [False] * (PLACES - 1) + [True]
    assert np.any(np.asarray(after["attention"]["cached_key"]), axis=(0, 2, 3)).tolist() == changed.tolist()
    codes = [np.asarray(x) for x in graph.quantize(full, X[0])]
    no_file_differs(graph, codes, graph.run(*codes))


def no_file_differs(graph, codes, wanted) -> None:
    results = against_runtimes(graph, [codes], {"c": {}, "onnxruntime": {}})
    assert [result.differ for result in results] == [0, 0]
    found = export.deserialize(bytearray(to_bytes(graph.ir, batch=N, platforms=("cpu",)))).call(*codes)
    same(tuple(found), tuple(wanted))


@pytest.mark.parametrize(("made", "batch"), [(cached, N), (recurrent, 3)])
@pytest.mark.exhaustive
def test_c_keeps_the_state_in_a_struct(made, batch: int, tmp_path) -> None:
    """NAME_test.c also runs `NAME_init` and `NAME_step`, and compares the state in the end."""
    graph = made()[1]
    graph.emit("c", tmp_path, name="net", batch=batch, vectors=4)
    header = (tmp_path / "net.h").read_text()
    assert "void net_init(net_state *state);" in header
    assert "void net_step(net_state *state, const int8_t *x" in header
    flags = f"CFLAGS={FLAGS} -fsanitize=address,undefined"
    said = subprocess.run(["make", "-s", "-C", tmp_path, flags, "test"], capture_output=True, text=True, check=True)
    shapes = [[batch if n is None else n for n in graph.ir.tensors[name].shape] for name in graph.ir.outputs]
    every = sum(math.prod(shape) for shape in shapes)
    kept = sum(np.size(leaf) for leaf in jax.tree.leaves(graph.state(batch=batch)))
    # 4 calls of NAME_run, 4 of NAME_step, and the last state
    assert said.stdout.startswith(f"net: 0 of {4 * every + 4 * (every - kept) + kept} codes differ")


def test_what_is_no_state_is_refused() -> None:
    model, graph = cached()
    state, floats = graph.state(batch=N), model.state()
    with pytest.raises(
        TypeError, match=r"expected codes of dtype int8, got float32. graph.state\(values\) quantizes floats"
    ):
        graph.step(floats, X[0])
    with pytest.raises(TypeError, match="keys a: attention missing"):
        graph.state({"a": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"expected shape \(batch, 5, 2, 4\), got \(2, 6, 2, 4\)"):
        graph.state(jax.tree.map(lambda a: jnp.zeros((N, 6, 2, 4)) if a.ndim else a, floats))
    _, small = cached(4)
    wrong = jax.tree.map(lambda a: a + 9 if a.ndim else a, small.state(batch=N))
    with pytest.raises(ValueError, match=r"expected codes in \[-8, 7\], got 80 others"):
        small.step(wrong, X[0])
    qmodel, plain, batches = recurrent()
    with pytest.raises(TypeError, match="expected at least 2 arguments besides the state, got 1"):
        plain.step(plain.state(batch=3), batches[0][0])
    with pytest.raises(ValueError, match=r"The graph has no state. .*qjax.convert\(qmodel, sample, state=...\)"):
        qjax.convert(qmodel, batches[0]).step(state, *batches[0][:2])
    with pytest.raises(
        ValueError, match=r"expected an argument of the call \(x, scale, h, or a position\), got 'cache'"
    ):
        qjax.convert(qmodel, batches[0], state="cache")
    with pytest.raises(
        ValueError, match="no part of the result has the structure, shapes and dtypes of the argument 'x'"
    ):
        qjax.convert(qmodel, batches[0], state="x")
