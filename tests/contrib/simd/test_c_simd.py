"""Emitted C with vectors: the codes of the interpreter under every set of instructions that this machine has."""

import dataclasses

import numpy as np
import pytest

from qjax.contrib.simd import cortex_windows, vector_channels, vector_windows
from qjax.export.emit import requantizations
from qjax.export.emit.c import to_files
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.program import build
from qjax.export.emit.c.values import Buffer
from qjax.export.emit.c.windows import Window
from qjax.export.emit.requantize_as_shift import Span, fit, thresholds
from qjax.export.emit.requantize_float32 import Scaled
from qjax.export.integer_graph import IntegerGraph
from tests.contrib.simd import simd_layers
from tests.export.emit import c_build, nodes
from tests.lower.lowered import residual_network

VARIANTS = {
    "none": ((), ["-O0"]),
    "AVX2": (("avx2",), ["-O2", "-mavx2"]),
    "AVX-VNNI": (("avx_vnni",), ["-O2", "-mavx2", "-mavxvnni"]),
    "AVX-512 VNNI": (("avx512_vnni", "avx512bw"), ["-O2", "-mavx512f", "-mavx512bw", "-mavx512vnni"]),
    "VNNI of 256 bits": (("avx512_vnni", "avx512vl"), ["-O2", "-mavx2", "-mavx512vnni", "-mavx512vl"]),
}
"""What a variant needs of a processor, as Linux names it, and the flags that choose it."""
TARGETS = {"tflite_micro": (8, True), "onnxruntime": (8, False), "tflite_xnnpack": (4, True)}
"""Target -> bits of the weights, and whether the activations are int8; uint8 otherwise."""
CORTEX_M = {
    "DSP extension": ["-O2", "-mthumb"],
    "DSP extension in Arm instructions, without optimization": ["-O0", "-marm"],
    "DSP extension with a frame pointer": ["-Os", "-mthumb", "-fno-omit-frame-pointer"],
}
"""Flags for Linux on 32-bit ARM, which has the DSP extension of a Cortex-M; Helium: see `test_firmware.py`."""
MACHINES = {
    "NEON": ("aarch64-linux-gnu-gcc", "qemu-aarch64", "-march=armv8-a", False),
    "NEON with dot products": ("aarch64-linux-gnu-gcc", "qemu-aarch64", "-march=armv8.2-a+dotprod", False),
    "s390x": ("s390x-linux-gnu-gcc", "qemu-s390x", "-O1", True),
}


def shares(count):
    """The layers in turn, each under one target only."""
    return [slice(first, None, count) for first in range(count)]


WHICH = [pytest.param(False, id="shared"), pytest.param(True, id="all", marks=pytest.mark.exhaustive)]
"""Whether every layer is under every target; else each is under one of them, which `make test` is content with."""


@pytest.fixture(scope="module", params=WHICH)
def which(request):
    return dict(zip(TARGETS, [simd_layers.WHOLE] * 3 if request.param else shares(3), strict=True))


@pytest.fixture(scope="module")
def graphs(which):
    return {
        target: simd_layers.graph(target, bits, signed=signed, which=which[target])
        for target, (bits, signed) in TARGETS.items()
    }


def compiled(graphs, batch, folder, simd: bool | str = True):
    given = {name: (graph, simd_layers.codes(graph, batch)) for name, graph in graphs.items()}
    return c_build.Compiled(given, folder, batch, simd=simd)


@pytest.fixture(scope="module")
def layers(graphs, tmp_path_factory):
    return compiled(graphs, 3, tmp_path_factory.mktemp("simd"))


@pytest.fixture(scope="module", params=WHICH)
def products(request, tmp_path_factory):
    """Formulas in float32 and in fixed point; codes of int8 and of uint8."""
    chosen = {"tflite_micro": True, "onnxruntime": False}
    found = {
        target: simd_layers.graph(target, signed=signed, products=True, which=which)
        for (target, signed), which in zip(
            chosen.items(), [simd_layers.WHOLE] * 2 if request.param else shares(2), strict=True
        )
    }
    return compiled(found, 3, tmp_path_factory.mktemp("products"))


@pytest.fixture(scope="module")
def cortex_m(graphs, layers, tmp_path_factory):
    found = compiled(graphs, 3, tmp_path_factory.mktemp("cortex_m"), "cortex_m")
    found.expected = layers.expected
    return found


SELDOM = [pytest.mark.exhaustive]
SOMETIMES = [pytest.param(name, marks=SELDOM if "VNNI" in name and "512" not in name else []) for name in VARIANTS]
"""The variants; what one of 256 bits with VNNI adds to the others is tested in `make test-all`."""


def assert_built_and_equal(made, needed, flags):
    if c_build.has(needed):
        made.assert_equal(made.called(*flags))
    else:
        # under every warning, and without optimization, because it is not run
        c_build.compiled(made.text, made.folder, *(flag for flag in flags if not flag.startswith("-O")), "-O0")


@pytest.mark.parametrize("variant", SOMETIMES)
def test_layers_of_every_shape(variant, layers):
    assert_built_and_equal(layers, *VARIANTS[variant])


@pytest.mark.parametrize("own", range(1, 9))
@pytest.mark.exhaustive
def test_tiles_of_every_number_of_positions(own, graphs, tmp_path, monkeypatch):
    needed, flags = VARIANTS["AVX-512 VNNI"]
    if not c_build.has(needed):
        return
    monkeypatch.setitem(vector_windows._SPEED, own, 1e6)
    made = compiled({"onnxruntime": graphs["onnxruntime"]}, 3, tmp_path)
    made.assert_equal(made.called(*flags))


@pytest.mark.exhaustive
def test_codes_without_a_form_in_vectors(graphs, tmp_path, monkeypatch):
    for module in (vector_channels, vector_windows):
        monkeypatch.setattr(module, "codes_of", lambda *given: None)
    made = compiled({"tflite_micro": graphs["tflite_micro"]}, 2, tmp_path)
    assert "= sums64_rows_" not in made.text
    made.assert_equal(made.called("-O2"))


@pytest.mark.exhaustive
def test_one_example_under_sanitizers(graphs, tmp_path):
    flags = next(flags for needed, flags in reversed(VARIANTS.values()) if c_build.has(needed))
    layers = compiled(graphs, 1, tmp_path)
    layers.assert_equal(layers.run(*c_build.SANITIZERS, *flags[1:]))


@pytest.mark.parametrize("variant", SOMETIMES)
def test_products_of_activations(variant, products):
    assert_built_and_equal(products, *VARIANTS[variant])


def test_products_of_activations_under_sanitizers(products):
    flags = next(flags for needed, flags in reversed(VARIANTS.values()) if c_build.has(needed))
    products.assert_equal(products.run(*c_build.SANITIZERS, *flags[1:]))


def test_which_products_of_activations_are_in_vectors():
    text = to_files(simd_layers.graph("onnxruntime", products=True), simd=True, vectors=0)["model.c"]
    functions = text[text.index("static void model_") :].split("static void model_dot")[1:]
    # not the sum of a sum, not three rows, and not a last axis that both operands have
    assert [number for number, body in enumerate(functions) if "sums16_add" not in body] == [3, 7, 8]
    assert len(functions) == 9


def test_cortex_m_in_plain_loops_under_sanitizers(cortex_m):
    cortex_m.assert_equal(cortex_m.run(*c_build.SANITIZERS))


def test_functions_of_cortex_m_are_used(cortex_m, which):
    starts = [cortex_m.text.index(f"static void {target}_") for target in TARGETS]
    for target, start, end in zip(TARGETS, starts, [*starts[1:], None], strict=True):
        body = cortex_m.text[start:end]
        sums = body.count("qjax_sums") + body.count("qjax_channels")
        # weights of 4 bits remain packed; some lines of a rule in floats have no form in 32 bits
        least = 12 if which[target] == simd_layers.WHOLE else len(simd_layers.LAYERS) // 3
        assert (sums > least) == (target != "tflite_xnnpack"), target
        assert ("acc[i]" in body) == (target == "onnxruntime"), target


def test_depthwise_weights_of_minus_128_have_no_form_for_cortex_m():
    kernel = np.full((8, 3, 3, 1), -127, np.int8)
    x = Buffer((1, 5, 5, 8), "int8", "in")
    window = Window(x, kernel, 0, (1, 1), (1, 1), (1, 1), 8, (0, 1, 2, 3))
    assert cortex_windows.fits(window)
    kernel[3, 1, 1] = -128
    assert not cortex_windows.fits(window)


def test_weights_of_cortex_m_take_the_bytes_of_plain_loops():
    """But for up to 15 of each table, which functions read behind the last weight."""
    graph = nodes.finished(residual_network(), "tflite_micro")
    plain, other = (build(graph, 1, Source(simd=simd), "m_").source for simd in (False, "cortex_m"))
    assert "cortex_m" in other.helpers
    assert 0 <= other.weight_bytes - plain.weight_bytes <= 15 * len(graph.nodes)


def test_vectors_are_used(graphs, which):
    for target, graph in graphs.items():
        text = to_files(graph, simd=True, vectors=0)["model.c"]
        body = text[text.index("static void") :]
        calls = body.count("= sums16_add_") + body.count("= sums16_rows_") + 4 * body.count("= sums64_rows_")
        integers = body.count("numbers16_quotients(") + body.count("numbers16_sides(")
        floats = body.count("numbers16_scaled(")
        assert calls > 12, target
        suffix = "i8" if TARGETS[target][1] else "u8"
        assert body.count("= sums64_rows_") == len(simd_layers.DEPTHWISE[which[target]])
        own = [body.count(f"= sums{name}_{suffix}(") for name in ("16_add", "16_rows", "64_rows")]
        assert calls == own[0] + own[1] + 4 * own[2]
        # the rules of these two runtimes are one product in float32
        assert (integers, floats) == ((0, calls) if target in ("onnxruntime", "tflite_xnnpack") else (calls, 0))
        assert "sums16" not in to_files(graph, vectors=0)["model.c"]


@pytest.mark.exhaustive
def test_a_product_in_floats_needs_no_line(graphs, tmp_path, monkeypatch):
    """One channel of thousands without a line would keep a layer from its vectors."""
    # other tests have the lines of these layers remembered
    for name in ("fit", "line_within"):
        monkeypatch.setattr(requantizations, name, lambda *args, **options: None)
    graph = graphs["onnxruntime"]
    body = to_files(graph, simd=True, vectors=0)["model.c"]
    assert body.count("numbers16_scaled(") > 12
    made = compiled({"onnxruntime": graph}, 2, tmp_path)
    made.assert_equal(made.called("-O2"))
    body = to_files(graphs["tflite_micro"], simd=True, vectors=0)["model.c"]
    assert "numbers16_quotients(" not in body[body.index("static void") :]


def test_a_product_in_floats_is_compared_with_the_rule():
    """All places where codes begin: one sum that is rounded otherwise is seen."""
    span = Span(*(np.array([end, end], np.int64) for end in (-5000, 5000, 0)))
    scaled = Scaled(np.array([3, -70]), np.array([0.031, 0.07], np.float32), 5, -128, 127)

    def rule(acc, channels):
        return scaled.codes(acc[:, None])[np.arange(acc.size), channels]

    def other(acc, channels):
        return rule(acc + ((channels == 1) & (acc == 1034)), channels)

    begins = thresholds(rule, span, -128, 127)
    assert 1035 in begins[:, 1]
    assert scaled.is_rule(rule, span)
    assert not scaled.is_rule(other, span)
    assert not dataclasses.replace(scaled, scale=-scaled.scale).is_rule(rule, span)
    assert not dataclasses.replace(scaled, bias=np.array([2**31, 0])).is_rule(rule, span)


def test_a_constant_channel_keeps_its_layer_in_floats():
    """A channel whose sums all have one code has a line of factor 0."""
    span = Span(*(np.array([end, end], np.int64) for end in (-900, 900, 0)))
    scaled = Scaled(np.array([3, -70]), np.array([0.0004, 0.07], np.float32), 5, -128, 127)

    def rule(acc, channels):
        return scaled.codes(acc[:, None])[np.arange(acc.size), channels]

    line = fit(rule, span, -128, 127, bits=31)
    assert line is not None
    assert line.factor[0] == 0 < line.factor[1]
    assert scaled.is_line(line, span.low, span.high)
    other = dataclasses.replace(scaled, scale=np.array([0.0008, 0.07], np.float32))
    assert not other.is_line(line, span.low, span.high)


@pytest.mark.parametrize("variant", ["none", "AVX2"])
@pytest.mark.exhaustive
def test_every_operation_rule_and_formula(variant, tmp_path):
    needed, flags = VARIANTS[variant]
    if not c_build.has(needed):
        return
    everything = c_build.Compiled({**nodes.of_operations(), **nodes.of_targets()}, tmp_path, simd=True)
    everything.assert_equal(everything.called(*flags))


@pytest.mark.exhaustive
def test_the_files_pass_their_own_test(graphs, tmp_path):
    IntegerGraph(graphs["tflite_micro"]).emit("c", tmp_path, name="net", simd=True)
    c_build.check(["make", "-C", str(tmp_path), "test", "CFLAGS=-O2 -march=native"])


@pytest.mark.oracle
@pytest.mark.parametrize("machine", MACHINES)
def test_other_machines(machine, layers, products):
    compiler, emulator, flag, big = MACHINES[machine]
    emulated = [emulator] if big else [emulator, "-cpu", "max"]
    for given in (layers, products):
        given.assert_equal(given.run("-O2", "-static", flag, compiler=compiler, emulator=emulated, big_endian=big))


@pytest.mark.oracle
@pytest.mark.parametrize("form", CORTEX_M)
def test_the_dsp_extension(form, cortex_m):
    flags = ["-static", "-mcpu=cortex-a9", *CORTEX_M[form]]
    cortex_m.assert_equal(cortex_m.run(*flags, compiler="arm-linux-gnueabihf-gcc", emulator=["qemu-arm"]))


@pytest.mark.oracle
def test_cortex_m_where_the_first_byte_is_the_greatest(cortex_m):
    emulated = {"compiler": "s390x-linux-gnu-gcc", "emulator": ["qemu-s390x"], "big_endian": True}
    cortex_m.assert_equal(cortex_m.run("-O1", "-static", **emulated))


@pytest.mark.oracle
def test_every_operation_rule_and_formula_with_the_dsp_extension(tmp_path):
    everything = c_build.Compiled({**nodes.of_operations(), **nodes.of_targets()}, tmp_path, simd="cortex_m")
    flags = ["-O2", "-static", "-mcpu=cortex-a9", "-mthumb"]
    everything.assert_equal(everything.run(*flags, compiler="arm-linux-gnueabihf-gcc", emulator=["qemu-arm"]))
