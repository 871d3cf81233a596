"""Emitted C that computes bit by bit: the codes of the interpreter, and where it is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.simd import one_bit
from qjax.export.emit.c import to_files
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.program import build
from qjax.export.emit.c.values import Buffer
from qjax.export.emit.c.windows import Window
from qjax.export.emit.possible_codes import few_codes
from tests.contrib.simd import one_bit_layers
from tests.contrib.simd.one_bit_layers import LAYERS, binary, ternary
from tests.contrib.simd.test_c_simd import CORTEX_M, MACHINES
from tests.export.emit import c_build

VARIANTS = {
    "plain": ((), ["-O1"]),
    "POPCNT": (("popcnt",), ["-O2", "-mpopcnt"]),
    "AVX-512": (("avx512bw", "avx512_vpopcntdq"), ["-O2", "-mavx512f", "-mavx512bw", "-mavx512vpopcntdq"]),
}
"""What a variant needs of a processor, as Linux names it, and the flags that choose it."""
SELDOM = [pytest.mark.exhaustive]
SOMETIMES = [pytest.param(name, marks=SELDOM if name == "POPCNT" else []) for name in VARIANTS]
UNSIGNED = (LAYERS[2], LAYERS[7], LAYERS[8], LAYERS[10])
SOME = tuple(layer for layer in LAYERS if layer not in (LAYERS[2], LAYERS[5], LAYERS[7], LAYERS[10]))
"""The others stand among those of uint8, or have the window of another."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(SOME, id="some"), pytest.param(LAYERS, id="all", marks=pytest.mark.exhaustive)],
)
def signed(request):
    return request.param


@pytest.fixture(scope="module")
def graphs(signed):
    """Codes of int8, and of uint8."""
    return {
        "tflite_micro": one_bit_layers.graph("tflite_micro", signed),
        "onnxruntime": one_bit_layers.graph("onnxruntime", UNSIGNED, signed=False),
    }


@pytest.fixture(scope="module")
def layers(graphs, tmp_path_factory):
    given = {name: (graph, one_bit_layers.codes(graph, 2)) for name, graph in graphs.items()}
    return c_build.Compiled(given, tmp_path_factory.mktemp("bits"), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", SOMETIMES)
def test_layers_of_every_shape(variant, layers):
    needed, flags = VARIANTS[variant]
    # built under every warning also where it cannot run
    c_build.compiled(layers.text, layers.folder, *flags)
    if c_build.has(needed):
        layers.assert_equal(layers.called(*flags))


def test_under_sanitizers(layers):
    layers.assert_equal(layers.run(*c_build.SANITIZERS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("simd", [False, True, "cortex_m"])
def test_which_layers_are_bit_by_bit(graphs, signed, simd):
    for graph, layers in zip(graphs.values(), (signed, UNSIGNED), strict=True):
        text = to_files(graph, vectors=0, simd=simd)["model.c"]
        functions = text[text.index("static void model_") :].split("static void ")
        assert sum("qjax_common(" in function for function in functions) == sum(layer.bits for layer in layers)


def test_pairs_of_planes():
    """Ternary codes with ternary weights pay only beside vectors, where an output sums many products."""
    kernel = np.random.default_rng(0).integers(-1, 2, (16, 3, 3, 64)).astype(np.int8)
    x = Buffer((1, 5, 5, 64), "int8", "in")
    window = Window(x, kernel, 0, (1, 1), (1, 1), (1, 1), 1, (0, 1, 2, 3))
    assert [one_bit.fits(window, (-1, 0, 1), wide=wide) for wide in (False, True)] == [False, True]
    assert all(one_bit.fits(window, (-1, 1), wide=wide) for wide in (False, True))
    assert not one_bit.fits(window, None, wide=True)
    window = dataclasses.replace(window, kernel=kernel[:, :2, :2])
    assert not one_bit.fits(window, (-1, 0, 1), wide=True)


@pytest.mark.exhaustive
def test_a_weight_takes_a_bit():
    graph = one_bit_layers.graph("tflite_micro", (one_bit_layers.Layer(64, 16),))
    sizes: list[int] = []
    for fits in (one_bit.fits, lambda *args, wide: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_bit, "fits", fits)
            sizes.append(build(graph, 1, Source()).source.weight_bytes)
    assert sizes == [9 * 64 * 16 // 8, 9 * 64 * 16]


class _Base(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)


class Signs(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(binary(x))


class Moved(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        moved = nnx.max_pool(binary(x)[:, ::-1].transpose(0, 2, 1, 3), (2, 2), (2, 2))
        return self.dense(moved.reshape(len(x), -1, 8))


class Padded(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(jnp.pad(binary(x), ((0, 0), (1, 1), (0, 0), (0, 0))))


class Ternary(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(ternary(x))


class Joined(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = binary(x)
        return self.dense(jnp.concatenate([y, y[:, ::-1]], axis=1))


class Plain(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(nnx.relu(x))


class Added(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(binary(x) + binary(x - 1.0) + x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "count"),
    [(Signs, 2), (Moved, 2), (Padded, 3), (Ternary, 3), (Joined, 2), (Plain, None), (Added, None)],
)
def test_codes_that_a_tensor_can_hold(model, count):
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 8))
    qmodel = qjax.quantize(model(nnx.Rngs(0)), qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    node = next(node for node in reversed(graph.ir.nodes) if "kernel" in node.constants)
    found = few_codes(graph.ir, node.inputs[0], 3)
    assert (None if found is None else len(found)) == count


def test_narrow_grids():
    """A sum stays on a grid of two bits. What a caller gives may not, wherever it is moved."""
    x = jax.random.normal(jax.random.key(0), (2, 2, 4))
    dense = [nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    model = nnx.Sequential(lambda x: x.reshape(len(x), -1), *dense)
    qmodel = qjax.quantize(model, qjax.Recipe(activations=qjax.QSpec(bits=2, symmetric=False)), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    graph = qjax.convert(qmodel, x).ir
    assert few_codes(graph, graph.inputs[0], 4) is None
    moved, first, _ = (node.output for node in graph.nodes)
    assert few_codes(graph, moved, 4) is None
    assert few_codes(graph, first, 4) == (-2, -1, 0, 1)
    assert few_codes(graph, first, 3) is None


def test_rows_that_do_not_fit_the_stack_have_no_form():
    """2,048 bytes of bits: 16,384 products with binary codes, half of them with ternary ones."""
    kernel = np.where(np.random.default_rng(0).random((8, 2**14 + 1)) < 0.5, -1, 1).astype(np.int8)

    def window(size: int) -> Window:
        x = Buffer((1, size), "int8", "in")
        return Window(x, np.ascontiguousarray(kernel[:, :size]), 0, (), (), (), 1, (0, 1))

    assert [one_bit.fits(window(size), (-1, 1), wide=False) for size in (2**14, 2**14 + 1)] == [True, False]
    assert [one_bit.fits(window(size), (-1, 0, 1), wide=False) for size in (2**13, 2**13 + 1)] == [True, False]


def test_sums_that_could_leave_32_bits_have_no_form():
    kernel = np.full((8, 1, 1, 2**17), 127, np.int8)
    kernel[:, :, :, ::2] = -127
    window = Window(Buffer((1, 1, 1, 2**17), "int8", "in"), kernel, 0, (1, 1), (1, 1), (0, 0), 1, (0, 1, 2, 3))
    assert not one_bit.fits(window, (-128, 127), wide=False)


class Dead(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(binary(nnx.relu(x)))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*a single number")
def test_a_table_of_one_number(tmp_path):
    """Its C reads no variable that it declares: compilers warn of that."""
    x = jax.random.normal(jax.random.key(0), (2, 8))
    qmodel = qjax.quantize(Dead(nnx.Rngs(0)), qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    given = {"net": (graph.ir, [np.asarray(graph.quantize(x))])}
    made = c_build.Compiled(given, tmp_path, 2)
    made.assert_equal(made.called())


@pytest.mark.oracle
@pytest.mark.parametrize("machine", MACHINES)
def test_other_machines(machine, layers):
    compiler, emulator, flag, big = MACHINES[machine]
    emulated = [emulator] if big else [emulator, "-cpu", "max"]
    layers.assert_equal(layers.run("-O2", "-static", flag, compiler=compiler, emulator=emulated, big_endian=big))


@pytest.mark.oracle
def test_on_32_bits(layers):
    flags = ["-static", "-mcpu=cortex-a9", *CORTEX_M["DSP extension"]]
    layers.assert_equal(layers.run(*flags, compiler="arm-linux-gnueabihf-gcc", emulator=["qemu-arm"]))
