"""Circuits: alkaid's emulator gives the codes of the graph, under every target whose rules have a form."""

import functools
import json
import random
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.support.errors import Unsupported
from tests.contrib.onnx_styles.qonnx_networks import graph_of
from tests.contrib.rtl.rtl_networks import (
    Attention,
    Dense,
    Kinds,
    Recurrent,
    Residual,
    Tokens,
    converted,
    for_fpga,
    with_learned_bits,
)

trace = pytest.importorskip("alkaid.trace", reason="alkaid has wheels for x86-64 Linux and ARM macOS only")

from qjax.contrib import rtl  # noqa: E402
from qjax.contrib.rtl import circuits, words  # noqa: E402
from qjax.contrib.rtl.words import Word, constant  # noqa: E402

NAMES = targets.names()
WITHOUT_ADDITIONS = {
    *("tflite_optimized_arm", "tflite_optimized_x86"),
    *("torch_fbgemm", "torch_fbgemm_avx2", "torch_onednn", "torch_onednn_avx2"),
}
"""Their residual sums have no form: no plane is their formula, and its own steps are too wide or in floats."""


# ---------------------------------------------------------------------------- words


def found(function: Any, *inputs: np.ndarray) -> np.ndarray:
    """What a circuit of words computes of numbers of 8 bits."""
    variables = [trace.FVariable(-128, 127, 1, hwconf=words.hardware()) for _ in inputs]
    result = function(*(words.word(variable) for variable in variables))
    # the constant of a result is known, however long it is
    logic = trace.trace(variables, [words.settled(Word(result.value))], keep_dead_inputs=True)
    values = np.asarray(logic.predict(np.stack(inputs, 1).astype(np.float64))).reshape(-1).astype(np.int64)
    return values + result.offset


ALL = np.arange(-128, 128)
PAIRS = np.stack(np.meshgrid(ALL[::5], ALL[::7]), -1).reshape(-1, 2)
LARGE = [0, 1, -1, 77, (1 << 22) + 1, (1 << 30) - 1, -(1 << 33) + 12345, (1 << 40) + (1 << 21) + 3]


@pytest.mark.parametrize("shift", [1, 3, 7, 21, 31])
@pytest.mark.parametrize("offset", LARGE)
@pytest.mark.sampled(12)
def test_shifts_of_sums_with_constants_of_any_width(offset, shift):
    """alkaid alone loses the digits of a constant beyond the 24th."""
    for factor in (1, -3, 8, 1 << 20):
        sums = [int(x) * factor + offset for x in ALL]
        total = functools.partial(_total, factor, offset)
        floors = found(lambda x, total=total: words.shifted_right(total(x), constant(shift)), ALL)
        np.testing.assert_array_equal(floors, [number >> shift for number in sums])
        rounded = found(lambda x, total=total: words.rounded_right(total(x), constant(shift)), ALL)
        np.testing.assert_array_equal(rounded, [round(Fraction(number, 1 << shift)) for number in sums])
        negative = found(lambda x, total=total: words.negative(total(x)), ALL)
        np.testing.assert_array_equal(negative, [number < 0 for number in sums])


def _total(factor: int, offset: int, x: Word) -> Word:
    return words.add(words.scaled(x, factor), constant(offset))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offset", [0, 1, -1, 100, -128, 127])
def test_functions_of_one_word(offset):
    moved = ALL + offset
    x = constant(offset)
    for mask in (0, 1, 3, 127, 255, -1, -2, -16):
        np.testing.assert_array_equal(
            found(lambda y, m=mask: words.masked(words.add(y, x), constant(m)), ALL), moved & mask
        )
    for dtype in ("int8", "uint8", "int16"):
        wrapped = found(lambda y, d=dtype: words.wrapped(words.scaled(words.add(y, x), 3), d), ALL)
        np.testing.assert_array_equal(wrapped, (moved * 3).astype(dtype))
    np.testing.assert_array_equal(found(lambda y: words.relu(words.add(y, x)), ALL), np.maximum(moved, 0))
    np.testing.assert_array_equal(found(lambda y: words.magnitude(words.add(y, x)), ALL), abs(moved))
    np.testing.assert_array_equal(found(lambda y: words.nonzero(words.add(y, x)), ALL), moved != 0)
    for limit in (-300, -5, 0, 5, 300):
        np.testing.assert_array_equal(
            found(lambda y, n=limit: words.maximum(words.add(y, x), constant(n)), ALL), np.maximum(moved, limit)
        )
        np.testing.assert_array_equal(
            found(lambda y, n=limit: words.minimum(constant(n), words.add(y, x)), ALL), np.minimum(moved, limit)
        )
        picked = found(lambda y, n=limit: words.chosen(words.less(y, constant(n)), x, words.scaled(y, -3)), ALL)
        np.testing.assert_array_equal(picked, np.where(limit > ALL, ALL * -3, offset))
        picked = found(lambda y, n=limit: words.chosen(words.inverted(words.less(y, constant(n))), x, constant(7)), ALL)
        np.testing.assert_array_equal(picked, np.where(limit <= ALL, 7, offset))


def _small(x: Word) -> Word:
    return words.less(x, constant(9))


def test_functions_of_two_words():
    a, b = PAIRS.T
    for x, y in ((0, 0), (3, -9), (128, 128)):
        left, right = a + x, b + y

        def pair(function: Any, x: int = x, y: int = y) -> np.ndarray:
            return found(lambda p, q: function(words.add(p, constant(x)), words.add(q, constant(y))), a, b)

        np.testing.assert_array_equal(pair(words.product), left * right)
        np.testing.assert_array_equal(pair(words.sub), left - right)
        np.testing.assert_array_equal(pair(words.maximum), np.maximum(left, right))
        np.testing.assert_array_equal(pair(words.minimum), np.minimum(left, right))
        np.testing.assert_array_equal(pair(words.less), left < right)
        both = pair(lambda p, q: words.both(_small(p), words.nonzero(q)))
        np.testing.assert_array_equal(both, (left < 9) & (right != 0))
        either = pair(lambda p, q: words.either(_small(p), words.nonzero(q)))
        np.testing.assert_array_equal(either, (left < 9) | (right != 0))
        np.testing.assert_array_equal(pair(lambda p, q: words.chosen(_small(p), p, q)), np.where(left < 9, right, left))


def test_tables_and_products_with_weights():
    rng = random.Random(0)
    table = [rng.randrange(-999, 999) for _ in range(256)]
    looked = found(lambda x: words.looked_up(words.add(x, constant(128)), table), ALL)
    np.testing.assert_array_equal(looked, table)
    even = found(
        lambda x: words.looked_up(
            words.add(words.scaled(words.shifted_right(x, constant(1)), -2), constant(126)), table
        ),
        ALL,
    )
    np.testing.assert_array_equal(even, [table[126 - 2 * (int(x) >> 1)] for x in ALL])
    weights = np.array([[5, -7], [(1 << 20) + 1, 0], [-128, 127]])

    def rows(x: Word, y: Word) -> Word:
        made = np.empty((1, 3), object)
        made[0] = [words.add(x, constant(3)), y, constant(11)]
        first, second = words.matmul(made, weights)[0]
        return words.sub(first, second)

    a, b = PAIRS.T
    sums = np.stack([a + 3, b, np.full_like(a, 11)], 1) @ weights
    np.testing.assert_array_equal(found(rows, a, b), sums[:, 0] - sums[:, 1])


def test_products_of_single_bits_that_are_negative():
    """Each of six shifted words is 0 or below: alkaid takes such bits for 0 or above, and adds them in one table."""
    variables = [trace.FVariable(-128, 127, 1, hwconf=words.hardware()) for _ in range(6)]
    weights = np.asarray([[3], [-5], [7], [1], [2], [-9]])
    signs = np.asarray([[words.shifted_right(words.word(variable), constant(7)) for variable in variables]], object)
    (made,) = words.matmul(signs, weights)[0]
    logic = trace.trace(variables, [words.settled(Word(made.value))], keep_dead_inputs=True)
    x = np.stack(np.meshgrid(*[[-3, 4]] * 6), -1).reshape(-1, 6)
    values = np.asarray(logic.predict(x.astype(np.float64))).reshape(-1) + made.offset
    np.testing.assert_array_equal(values, np.matmul(np.where(x < 0, -1, 0), weights)[:, 0])


def test_what_is_too_wide_is_refused():
    x = words.word(trace.FVariable(-128, 127, 1, hwconf=words.hardware()))
    with pytest.raises(Unsupported, match="at most 52 bits"):
        words.scaled(x, 1 << 46)
    with pytest.raises(Unsupported, match="more than 23 significant bits"):
        words.settled(words.add(x, constant((1 << 24) + 1)))
    with pytest.raises(Unsupported, match="'and' with 5"):
        words.masked(x, constant(5))
    with pytest.raises(Unsupported, match="into a table of 4 entries"):
        words.looked_up(x, [1, 2, 3, 4])
    with pytest.raises(Unsupported, match="that depends on the input"):
        words.shifted_right(constant(9), x)


def circuit_of_function(function: Any, *dtypes: str) -> list[Any]:
    """What the circuit of a JAX function gives for arrays of three words of 4 bits."""
    inputs = list[np.ndarray]()
    for _ in dtypes:
        array = np.empty(3, object)
        for place in range(3):
            array[place] = words.word(trace.FVariable(-8, 7, 1, hwconf=words.hardware()))
        inputs.append(array)
    return circuits.trace(function, inputs, dtypes).ravel().tolist()


def test_integers_become_truth_values():
    (x, _, _) = circuit_of_function(lambda x: x.astype(bool).astype(np.int32), "int32")
    assert (x.low, x.high) == (0, 1)
    numbers = np.arange(-8, 8)
    values = found(lambda y: words.nonzero(words.masked(y, constant(7))), numbers)
    np.testing.assert_array_equal(values, numbers % 8 != 0)


@pytest.mark.parametrize(
    ("function", "dtypes", "message"),
    [
        (lambda x: jax.lax.reduce_and(x, (0,)), ["int32"], "'reduce_and' of integers"),
        (lambda x: x | np.int32(6), ["int32"], "'or' has a form in a circuit for truth values only"),
        (lambda x: jax.lax.shift_left(x, np.int32(-1)), ["int32"], "'shift_left' by -1 places"),
        (
            lambda x: x.astype(np.float32).astype(np.int32),
            ["int32"],
            "returns float32, but a circuit only has integers",
        ),
        (lambda x: jax.lax.select_n(x, x, x, x), ["int32"], "'select_n' with 3 cases"),
        (lambda x: jnp.sort(x), ["int32"], "the primitive 'sort' has no form"),
    ],
    ids=["reduce_and", "or", "shift", "float", "select_n", "sort"],
)
def test_primitives_without_a_form_are_named(function, dtypes, message):
    with pytest.raises(Unsupported, match=message):
        circuit_of_function(function, *dtypes)


# ---------------------------------------------------------------------------- graphs


def differing(graph: Any) -> int:
    circuit, _ = rtl.build(graph.ir, vectors=2)
    shape = [64, *graph.ir.tensors[graph.ir.inputs[0]].shape[1:]]
    codes = np.asarray(graph.quantize(np.asarray(jax.random.normal(jax.random.key(1), shape)) * 2))
    expected = np.asarray(graph.run(codes)).reshape(64, -1)
    assert len(np.unique(expected)) > 5
    return int(np.sum(circuit.logic.predict(codes.reshape(64, -1).astype(np.float64)) != expected))


@pytest.mark.parametrize("kind", [Kinds, Recurrent, Attention, Residual], ids=lambda kind: kind.__name__)
@pytest.mark.sampled(1)
def test_networks_with_scales_that_are_powers_of_two(kind):
    assert differing(for_fpga(kind)) == 0


@pytest.mark.parametrize("dropped", [3.0, 6.0])
@pytest.mark.exhaustive
def test_networks_that_learned_their_bits(dropped):
    assert differing(with_learned_bits(dropped)) == 0


@pytest.mark.exhaustive
def test_a_network_of_qonnx():
    assert differing(graph_of("rows", "ternary")) == 0


@pytest.mark.parametrize("target", sorted(set(NAMES) - {"fpga"}))
@pytest.mark.exhaustive
def test_targets(target):
    graph = converted(Residual, target=target)
    if target in WITHOUT_ADDITIONS:
        with pytest.raises(Unsupported, match=r"RTL: node 'add' \(add\)"):
            rtl.build(graph.ir)
        graph = converted(Dense, target=target)
    assert differing(graph) == 0


@pytest.mark.exhaustive
def test_indices_take_the_bits_of_their_table():
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (32, 5), 0, 13))
    qmodel = qjax.quantize(Tokens(nnx.Rngs(0)), qjax.Recipe(), tokens)
    graph = qjax.convert(qmodel, tokens)
    circuit, _ = rtl.build(graph.ir, vectors=0)
    (given,) = circuit.inputs
    assert (given.low, given.high, given.bits) == (0, 12, 4)
    expected = np.asarray(graph.run(tokens))
    np.testing.assert_array_equal(circuit.logic.predict(tokens.astype(np.float64)), expected)


@pytest.mark.exhaustive
def test_a_file_of_another_tool(tmp_path):
    converted(Dense, target="tflite_reference").emit("tflite", tmp_path / "model.tflite")
    assert differing(qjax.read(tmp_path / "model.tflite", target="tflite_reference")) == 0


# ---------------------------------------------------------------------------- files and errors


def test_files_say_what_the_ports_hold(tmp_path):
    graph = for_fpga(Residual)
    graph.emit("rtl", tmp_path / "deep" / "project", name="net", stages=2)
    folder = tmp_path / "deep" / "project"
    ports = json.loads((folder / "net_ports.json").read_text())
    tensor = graph.ir.tensors[graph.ir.inputs[0]]
    assert ports["clocks"] == 3
    assert ports["model_inp"]["element_bits"] == 5
    assert ports["model_inp"]["tensors"][0]["scale"] == float(tensor.quantization.scale)
    assert ports["model_out"]["tensors"][0]["elements"] == 6
    assert {"net_test.v", "Makefile", "src"} <= {path.name for path in folder.iterdir()}
    assert "net_wrapper" in (folder / "src" / "net_wrapper.v").read_text()
    # the same graph gives the same files
    again = rtl.to_files(graph.ir, name="net", stages=2)
    sources = [name for name in again if name.endswith((".v", ".json", ".tcl"))]
    assert sources
    for name in sources:
        text = (folder / name).read_text()
        assert text == (again[name] if isinstance(again[name], str) else again[name].decode())


def test_wrong_options():
    graph = for_fpga(Dense).ir
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": "a b"}, "name of letters"),
        ({"language": "chisel"}, "verilog, vhdl"),
        ({"stages": -1}, "stages of at least 0"),
        ({"vectors": True}, "vectors of at least 0"),
        ({"period": 0.0}, "nanoseconds above 0"),
        ({"period": "5"}, "nanoseconds above 0"),
        ({"device": ""}, "name of a device"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            rtl.build(graph, **options)


@pytest.mark.filterwarnings("ignore:.*a single number")
def test_a_layer_that_is_too_large_is_refused_at_once():
    x = np.ones((4, 32, 32, 8), np.float32)
    qmodel = qjax.quantize(nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0)), qjax.Recipe(), x)
    qmodel.eval()
    with pytest.raises(Unsupported, match=r"RTL: node .* at most 262,144 become logic"):
        rtl.build(qjax.convert(qmodel, x).ir)


@pytest.mark.filterwarnings("ignore:.*a single number")
def test_float_islands_are_refused():
    x = np.ones((4, 6), np.float32)
    qmodel = qjax.quantize(Dense(nnx.Rngs(0)), qjax.Recipe(overrides={"second": qjax.FLOAT}), x)
    with pytest.raises(Unsupported, match="a circuit only has integers"):
        rtl.build(qjax.convert(qmodel, x).ir)


def test_a_circuit_that_differs_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "relu", lambda x: x)
    with pytest.raises(RuntimeError, match="codes of the circuit differ from the graph"):
        for_fpga(Dense).emit("rtl", tmp_path / "project")
    assert not (tmp_path / "project").exists()


def test_a_missing_alkaid_says_what_to_install(monkeypatch):
    monkeypatch.setattr(words.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ModuleNotFoundError, match="pip install alkaid"):
        words.load("alkaid.trace")
