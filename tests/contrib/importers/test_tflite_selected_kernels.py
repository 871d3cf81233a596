"""What in a file selects a kernel: the type of a bias, options, versions, further inputs. Unknown ones are refused."""

from typing import Any

import numpy as np
import pytest

from qjax.contrib.importers import tflite as reader
from qjax.contrib.importers.tflite import walk
from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.enums import NEWEST, OPTIONS
from qjax.export.tflite_schema.model import Operator
from qjax.run.interpreter import Interpreter
from tests.contrib.importers.tflite_models import File, Grid, schema
from tests.export.emit.tflite_runtimes import MODES, litert, micro

INT32, INT64 = schema.TensorType.INT32, schema.TensorType.INT64
VALID: dict[str, Any] = {"padding": 1, "strideH": 1, "strideW": 1}
KERNELS = {
    # name: operator, options, input, weights, output
    "rows": ("FULLY_CONNECTED", "FullyConnected", (150, 24), (12, 24), (150, 12)),
    "conv": ("CONV_2D", "Conv2D", (3, 6, 6, 8), (10, 3, 3, 8), (3, 4, 4, 10)),
    "groups": ("CONV_2D", "Conv2D", (3, 6, 6, 8), (10, 3, 3, 4), (3, 4, 4, 10)),
    "depthwise": ("DEPTHWISE_CONV_2D", "DepthwiseConv2D", (3, 6, 6, 10), (1, 3, 3, 10), (3, 4, 4, 10)),
    "transposed": ("TRANSPOSE_CONV", "TransposeConv", (2, 5, 5, 8), (11, 3, 3, 8), (2, 7, 7, 11)),
}


def product(file: File, kernel: str, bias: str | None, stated: int = 0, activation: int = 0, seed: int = 0):
    """Adds a product of int16 by int8 whose accumulators reach far into int32."""
    operator, options, x_shape, w_shape, y_shape = KERNELS[kernel]
    rng = np.random.default_rng([seed, len(file.graph.operators)])
    axis = 3 if kernel == "depthwise" else 0
    features = w_shape[axis]
    scale = rng.uniform(0.003, 0.01, features) if seed % 2 else 0.0071
    weights = rng.integers(-127, 128, w_shape).astype(np.int8)
    x_scale, depth = float(rng.uniform(1e-4, 2e-4)), weights.size // features
    x = file.tensor("int16", x_shape, Grid(x_scale))
    operands = [x, file.tensor("int8", w_shape, Grid(scale, 0, axis), weights)]
    if kernel == "transposed":
        operands = [file.numbers(y_shape), operands[1], x]
    if bias is not None:
        values = rng.integers(-(2**20), 2**20, features).astype(bias)
        operands.append(file.tensor(bias, [features], Grid(np.float32(x_scale) * np.float32(scale)), values))
    step = x_scale * float(np.max(scale)) * np.sqrt(depth) * 60
    y = file.tensor("int16", y_shape, Grid(step), name=f"{kernel} {bias} {stated} {seed}")
    fields: dict[str, Any] = {} if kernel == "rows" else dict(VALID)
    fields |= {"depthMultiplier": 1} if kernel == "depthwise" else {"quantizedBiasType": stated}
    file.operator(operator, operands, [y], options, fusedActivationFunction=activation, **fields)
    return x, y


READ = {
    "tflite_reference": [
        *(("rows", *kind) for kind in ((None, 0), (None, INT32), ("int32", INT32), ("int64", 0), ("int64", INT64))),
        *((kernel, *kind) for kernel in ("conv", "groups") for kind in (("int32", INT32), ("int64", INT64))),
        *(("transposed", *kind) for kind in ((None, 0), (None, INT32), ("int32", INT32), ("int64", 0))),
        ("depthwise", "int64", 0),
    ],
}
READ["tflite_optimized_x86"] = READ["tflite_xnnpack"] = [*READ["tflite_reference"], ("rows", "int32", 0)]
READ["tflite_micro"] = [
    *READ["tflite_reference"],
    *((kernel, "int32", 0) for kernel in ("rows", "conv")),
    *(("conv", None, stated) for stated in (0, INT32, INT64)),
]
READ["tflite_micro"].remove(("transposed", "int32", INT32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", READ)
def test_biases_of_16x8(target):
    """The kernels that the type of the bias and quantized_bias_type select."""
    file = File()
    made = [
        product(file, kernel, bias, stated, activation=seed, seed=seed)
        for index, (kernel, bias, stated) in enumerate(READ[target])
        for seed in ((0, 1) if kernel == "rows" else (index % 2,))
    ]
    inputs, outputs = zip(*made, strict=True)
    data = file.to_bytes(inputs, outputs)
    graph = reader.read(data, target=target)
    rng = np.random.default_rng(7)
    codes = []
    for index in inputs:
        x = rng.integers(-(2**15), 2**15, file.graph.tensors[index].shape)
        ends = rng.choice([-(2**15), 2**15 - 1], x.shape)
        codes.append(np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) % 3, x, ends).astype(np.int16))
    run = micro(data, codes, graph.outputs) if target == "tflite_micro" else litert(data, MODES[target], codes)
    for name, found in zip(graph.outputs, Interpreter(graph)(*codes), strict=True):
        assert np.array_equal(np.asarray(found), run[name]), name


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("tflite_reference", ("rows", "int32", 0), "has no FULLY_CONNECTED of int16 with a bias of int32 that its"),
        ("tflite_xnnpack", ("conv", "int32", 0), "has no CONV_2D of int16 with a bias of int32 that its"),
        ("tflite_micro", ("transposed", "int32", INT32), "Read it with target='tflite_reference'"),
        ("tflite_reference", ("transposed", "int32", 0), "Convert the model again with biases of int64"),
        ("tflite_micro", ("depthwise", "int32", 0), "Convert the model again with biases of int64"),
        ("tflite_optimized_arm", ("rows", None, 0), "FULLY_CONNECTED of int16 without a bias has a kernel of its own"),
        ("tflite_reference", ("rows", "int64", INT32), "a bias of int64, and its quantized_bias_type is int32"),
        ("tflite_reference", ("rows", "int32", INT64), "a bias of int32, and its quantized_bias_type is int64"),
    ],
)
def test_biases_that_no_kernel_reads_so(target, kind, message):
    file = File()
    x, y = product(file, *kind)
    with pytest.raises(ReadError, match=message):
        reader.read(file.to_bytes([x], [y]), target=target)


def test_int64_bias_of_8_bits():
    """LiteRT prepares such a model, and reads each half of an int64 as a bias."""
    file = File()
    x, w = file.tensor("int8", (2, 4), Grid(0.1)), file.tensor("int8", (3, 4), Grid(0.01), np.ones((3, 4), np.int8))
    b = file.tensor("int64", (3,), Grid(0.001), np.arange(3, dtype=np.int64))
    y = file.tensor("int8", (2, 3), Grid(0.1))
    file.operator("FULLY_CONNECTED", [x, w, b], [y], "FullyConnected")
    with pytest.raises(ReadError, match="is int64, no constant of int32"):
        reader.read(file.to_bytes([x], [y]))


# ---------------------------------------------------------------------------- options, versions, inputs


class Packed:
    """Options with one field more than the schema has."""

    def __init__(self, field: int) -> None:
        self.field = field

    def Pack(self, builder):
        builder.StartObject(self.field + 1)
        builder.PrependInt8Slot(self.field, 1, 0)
        return builder.EndObject()


def options_of(operator: str) -> str:
    """The name of an operator's options in the schema; "" where it has none with fields."""
    if operator not in OPTIONS:
        return ""
    return next(name for name, n in vars(schema.BuiltinOptions).items() if n == OPTIONS[operator][0])


def one_operator(name: str, **changes) -> bytes:
    """A file of one operator with one input; changes: of its table."""
    file = File()
    x, y = (file.tensor("int8", (1, 4, 4, 4), Grid(0.1)) for _ in range(2))
    file.operator(name, [x], [y])
    for field, value in changes.items():
        setattr(file.graph.operators[0], field, value)
    return file.to_bytes([x], [y])


def message_of(data: bytes) -> str:
    with pytest.raises(ReadError) as error:
        reader.read(data)
    return str(error.value)


TABLES = (walk.READERS, walk.FLOAT_READERS, walk.PIECE_READERS, walk.WHOLE_READERS)


def readers() -> list[str]:
    """The names of all operators that have a reader."""
    # readers register themselves when a file is read
    reader.read(one_operator("RELU"))
    return sorted(set().union(*TABLES))


def changed(default):
    """Another value of a field of the schema."""
    return [5] if default is None else not default if isinstance(default, bool) else default + 1


def looks_at_its_input(draft: walk.Walk, operator: Operator) -> None:
    """Reads no option."""
    draft.operand(operator, 0)


def test_options_that_nobody_looks_at(monkeypatch):
    """Every field of the schema is refused, one that qjax knows by its name, under readers that look at no option."""
    count = 0
    for name in readers():
        monkeypatch.setitem(walk.READERS, name, walk.Reader(looks_at_its_input))
        options = options_of(name)
        known = OPTIONS[name][1] if options else {}
        for field, default in vars(getattr(schema, f"{options}T")()).items() if options else ():
            held = getattr(schema, f"{options}T")()
            setattr(held, field, changed(default))
            message = message_of(one_operator(name, builtinOptionsType=OPTIONS[name][0], builtinOptions=held))
            named = [own for own in known if f"its option {own!r} is" in message]
            assert len(named) == 1 or f"which qjax's schema of {name} does not know" in message, (name, field)
            count += 1
        kind = OPTIONS[name][0] if options else schema.BuiltinOptions.AddOptions
        newer = one_operator(name, builtinOptionsType=kind, builtinOptions=Packed(len(known)))
        assert f"its options have field {len(known)}, which qjax's schema of {name}" in message_of(newer)
    assert count > 70


def test_fields_of_the_schema():
    """The defaults of the fields that are known here are those of the schema's own bindings, in their order."""
    for name, (_, known) in OPTIONS.items():
        held = list(vars(getattr(schema, f"{options_of(name)}T")()).values())
        fields = sorted(known.values())
        # two fields that the schema gave up have no bindings
        fields = fields[2:] if name == "RESIZE_BILINEAR" else fields
        defaults = [0 if form == "text" else default for _, form, default in fields]
        assert defaults == [int(value or 0) for value in held[: len(fields)]], name


def test_newer_versions():
    for name in set(readers()) & set(walk.READERS):
        file = File()
        x, y = (file.tensor("int8", (1, 4), Grid(0.1)) for _ in range(2))
        file.operator(name, [x], [y])
        file.model.operatorCodes[0].version = NEWEST.get(name, 1) + 1
        assert f"qjax knows {name} up to version {NEWEST.get(name, 1)}" in message_of(file.to_bytes([x], [y]))


def test_further_inputs():
    file = File()
    x, z = (file.tensor("int8", (1, 4), Grid(0.1), name=name) for name in "xz")
    y = file.tensor("int8", (1, 4), Grid(0.1))
    file.operator("RELU", [x, z], [y])
    assert "it has an input 1 ('z'), which qjax does not know" in message_of(file.to_bytes([x, z], [y]))


def test_fields_of_an_operator():
    assert "options of a custom operator or of StableHLO" in message_of(one_operator("RELU", customOptions=[1, 2]))
    for field, value in (("hasRank", True), ("externalBuffer", 1), ("variantTensors", [schema.VariantSubTypeT()])):
        file = File()
        x = file.tensor("int8", (1, 4), Grid(0.1), name="x")
        y = file.tensor("int8", (1, 4), Grid(0.1), name="y", **{field: value})
        file.operator("RELU", [x], [y])
        if field == "hasRank":
            assert len(reader.read(file.to_bytes([x], [y])).nodes) == 1
        else:
            assert "'y' is" in message_of(file.to_bytes([x], [y]))


def test_depth_multiplier():
    """TFLite Micro computes with the option, LiteRT with the shapes."""
    file = File()
    x, y = file.tensor("int8", (1, 4, 4, 2), Grid(0.1)), file.tensor("int8", (1, 4, 4, 4), Grid(0.1))
    w = file.tensor("int8", (1, 1, 1, 4), Grid(0.01), np.ones((1, 1, 1, 4), np.int8))
    b = file.tensor("int32", (4,), Grid(0.001), np.zeros(4, np.int32))
    file.operator("DEPTHWISE_CONV_2D", [x, w, b], [y], "DepthwiseConv2D", depthMultiplier=1, **VALID)
    assert "its depth_multiplier is 1, and its weights have 4 channels for 2" in message_of(file.to_bytes([x], [y]))


@pytest.mark.parametrize("mode", ["reference", "micro"])
def test_masks_of_strided_slice(mode):
    """An open begin counts where the axis is dropped, and an offset counts from the resolved begin."""
    file = File()
    x = file.tensor("int8", (4, 6), Grid(0.1))
    cases: list[Any] = [({"shrinkAxisMask": 1, "beginMask": 1}, (2, 0), (3, 6), (6,))]
    if mode != "micro":
        cases.append(({"offset": True}, (-2, 1), (2, 3), (2, 3)))
    outputs = []
    for fields, begin, end, shape in cases:
        outputs.append(file.tensor("int8", shape, Grid(0.1), name=str(fields)))
        numbers = [file.numbers(n) for n in (begin, end, (1, 1))]
        file.operator("STRIDED_SLICE", [x, *numbers], outputs[-1:], "StridedSlice", **fields)
    data = file.to_bytes([x], outputs)
    graph = reader.read(data)
    codes = np.arange(24, dtype=np.int8).reshape(4, 6)
    run = micro(data, [codes], graph.outputs) if mode == "micro" else litert(data, mode, [codes])
    for name, found in zip(graph.outputs, Interpreter(graph)(codes), strict=True):
        assert np.array_equal(np.asarray(found), run[name]), name


def test_compressed_weights():
    """TFLite Micro takes the indices in such a file for its weights' codes, as its metadata says."""
    file = File()
    x, y = (file.tensor("int8", (1, 4), Grid(0.1)) for _ in range(2))
    file.operator("RELU", [x], [y])
    entry = schema.MetadataT()
    entry.name, entry.buffer = "COMPRESSION_METADATA", 0
    file.model.metadata = [entry]
    assert "its weights are compressed for TFLite Micro" in message_of(file.to_bytes([x], [y]))
