"""Functions of one variable between quantizers: every code is ONNX Runtime's."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

import importlib.util

import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import qjax
from qjax.contrib.importers.onnx import read, runtime_tables
from qjax.contrib.importers.onnx.functions import FORMS
from qjax.export.read_errors import ReadError
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.onnx_models import Maker, session

GRIDS = [
    # steps of which many results are ties, and others
    ("uint8", 2.0**-5, 0, 2.0**-6, 10),
    ("uint8", 0.1, 100, 0.1, 128),
    ("uint8", 0.0371, 128, 1 / 256, 0),
    ("int8", 2.0**-4, 0, 2.0**-7, 0),
    ("int8", 0.1, -28, 0.1, 0),
    ("int8", 0.0371, -128, 1 / 256, -128),
    ("int16", 2.0**-12, 0, 2.0**-13, 0),
]
JUMPS = ("Floor", "Ceil", "Round", "ThresholdedRelu")
ON_CODES = {"Sigmoid": {}, "LeakyRelu": {"alpha": 0.1}}
PARTIAL = ["Sqrt", "Reciprocal", "Log"]
"""Functions that have no value at some codes: they are read where there are none."""


def functions(dtype, sx, zx, sy, zy):
    """x -> codes of every function, and the names of the outputs."""
    m = Maker(0)
    x = m.dequantize("x", "r", sx, zx, dtype)
    names = [op for op in FORMS if op not in PARTIAL]
    for op in names:
        alpha = {"alpha": 0.1} if op in ("LeakyRelu", "Elu") else {}
        m.quantize(m.node(op, [x], f"f_{op}", **alpha), op, sy, zy, dtype)
    if zx == np.iinfo(dtype).min:
        # of positive numbers
        m.quantize(m.node("Sqrt", [x], "f_Sqrt"), "Sqrt", sy, zy, dtype)
        m.quantize(m.node("Reciprocal", [m.node("Exp", [x], "fe")], "f_Reciprocal"), "Reciprocal", sy, zy, dtype)
        m.quantize(m.node("Log", [m.node("Cosh", [x], "fc")], "f_Log"), "Log", sy, zy, dtype)
        names += PARTIAL
    m.quantize(m.node("PRelu", [x, m.constant("slope", np.float32(0.25))], "fp"), "prelu", sy, zy, dtype)
    m.quantize(m.node("Pow", [x, m.constant("three", np.float32(3))], "fw"), "cube", sy, zy, dtype)
    m.quantize(m.node("Div", [x, m.constant("six", np.float32(6))], "fd"), "sixth", sy, zy, dtype)
    m.quantize(
        m.node("Div", [m.node("Abs", [x], "fa"), m.constant("odd", np.float32(0.7))], "fo"), "ratio", sy, zy, dtype
    )
    m.quantize(m.node("Gelu", [x], "fg", approximate="tanh"), "gelu_tanh", sy, zy, dtype)
    m.quantize(m.node("Relu", [m.node("Sin", [x], "sin")], "fr"), "chain", sy, zy, dtype)
    m.quantize(m.node("Softplus", [m.node("Neg", [x], "neg")], "fs"), "two", sy, zy, dtype)
    names += ["prelu", "cube", "sixth", "ratio", "gelu_tanh", "chain", "two"]
    if dtype != "int16":
        for op, attributes in ON_CODES.items():
            y = [*m.grid(f"{op}x", sx, zx, dtype), *m.grid(f"{op}y", sy, zy, dtype)]
            m.node(f"QLinear{op}", ["x", *y], f"ql_{op}", domain="com.microsoft", **attributes)
            names.append(f"ql_{op}")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = m.model({"x": ["n"]}, dict.fromkeys(names), 22, kind)
    model.ir_version = 10
    return model.SerializeToString(), names


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}-{grid[1]:.3g}")
def test_every_code_is_that_of_onnxruntime(grid):
    data, names = functions(*grid)
    graph = read(data)
    info = np.iinfo(grid[0])
    codes = np.arange(info.min, info.max + 1).astype(grid[0])
    codes = np.concatenate([codes, codes[:101][::-1]])
    expected = session(data, graph.metadata.get("onnxruntime_session", {})).run(None, {"x": codes})
    wrong = {
        name: int((np.asarray(got) != want).sum())
        for name, got, want in zip(names, Interpreter(graph)(codes), expected, strict=True)
        if not np.array_equal(got, want)
    }
    assert wrong == {}
    assert "floats_in_onnxruntime" not in graph.metadata


def test_another_target_gets_the_real_functions_and_no_runtime_is_asked(monkeypatch):
    data, names = functions(*GRIDS[1])
    exact = read(data)
    monkeypatch.setattr(runtime_tables, "answer", None)
    for options in ({"target": "nearest_even"}, {"floats": True}):
        graph = read(data, **options)
        codes = np.arange(256).astype(np.uint8)
        outputs = zip(names, Interpreter(graph)(codes), Interpreter(exact)(codes), strict=True)
        pairs = [(a, b) for name, a, b in outputs if name not in JUMPS]
        differences = [np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)) for a, b in pairs]
        # where the real value is a tie, float32 falls on either side of it
        assert max(d.max() for d in differences) <= 1
        assert sum(int((d != 0).sum()) for d in differences) < 20 * len(names)


def test_without_the_runtime_its_bits_are_not_known(monkeypatch):
    data, _ = functions(*GRIDS[0])
    found = importlib.util.find_spec
    monkeypatch.setattr(runtime_tables.importlib.util, "find_spec", lambda n: None if n == "onnxruntime" else found(n))
    with pytest.raises(
        ReadError, match=r"only running it shows the last bits: pip install onnxruntime; or read\(..., floats"
    ):
        read(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda m, x: m.node("Sigmoid", [m.node("Conv", [x, m.codes("w", (2, 3, 1, 1))], "c")], "s"),
            "is the result of 'c' in floats: a QuantizeLinear",
        ),
        (lambda m, x: m.node("Pow", [x, m.weight("p", 3)], "s"), "its second operand is not one constant number"),
        (lambda m, x: m.node("Div", [x, x], "s"), "its second operand is not one constant number"),
        (lambda m, x: m.node("Div", [x, m.constant("zero", np.float32(0))], "s"), "it divides by 0"),
    ],
)
def test_what_is_no_function_of_codes_is_refused(body, message):
    m = Maker(0)
    m.quantize(body(m, m.dequantize("x", "r", 0.1, 3)), "y", 0.1, 3)
    data = m.model({"x": ["n", 3, 4, 3]}, {"y": None}, kind=helper.np_dtype_to_tensor_dtype(np.dtype(np.uint8)))
    with pytest.raises(ReadError, match=message):
        read(data.SerializeToString())


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=str)
def test_a_hard_swish_that_divides_by_six(form, tmp_path):
    """As exporters write it and ONNX Runtime quantizes it: the division stays in floats between two quantizers."""
    m = Maker(0)
    numbers = {name: m.constant(name, np.float32(value)) for name, value in (("three", 3), ("zero", 0), ("six", 6))}
    first, second = m.weight("first", 8, 3, 3, 3), m.weight("second", 8, 8, 1, 1)
    h = m.node("Conv", ["x", first], "h", pads=[1, 1, 1, 1])
    gate = m.node("Clip", [m.node("Add", [h, numbers["three"]], "a"), numbers["zero"], numbers["six"]], "b")
    divided = m.node("Div", [m.node("Mul", [h, gate], "m"), numbers["six"]], "d")
    m.node("Conv", [divided, second], "y")
    model = m.model({"x": ["n", 3, 8, 8]}, {"y": None}, 17)
    onnx.save(model, tmp_path / "float.onnx")

    class Samples(CalibrationDataReader):
        batches = iter([{"x": m.rng.normal(size=(16, 3, 8, 8)).astype(np.float32)}])

        def get_next(self):
            return next(self.batches, None)

    path = tmp_path / "quantized.onnx"
    quantize_static(tmp_path / "float.onnx", path, Samples(), quant_format=form, weight_type=QuantType.QInt8)
    x = m.rng.normal(size=(64, 3, 8, 8)).astype(np.float32)
    # without VNNI its products of uint8 and int8 saturate otherwise
    config = {"session.x64quantprecision": "1"} if form is QuantFormat.QDQ else {}
    (want,) = session(path.read_bytes(), config).run(None, {"x": x})
    assert np.array_equal(np.asarray(qjax.read(path)(x)), want)
