"""Models of one operator, or a few, written with the schema's own bindings and nothing of qjax's emitter."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

schema: Any = __import__("ai_edge_litert.schema_py_generated", fromlist=["ModelT"])


@dataclasses.dataclass
class Grid:
    scale: Any
    zero_point: Any = 0
    axis: int = 0


class File:
    """A .tflite file under construction; tensors are named by their index."""

    def __init__(self) -> None:
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.model = schema.ModelT()
        self.model.version, self.model.subgraphs = 3, [self.graph]
        self.model.operatorCodes, self.model.buffers = [], [schema.BufferT()]

    def tensor(
        self, dtype: str, shape: Sequence[int], grid: Grid | None = None, data: Any = None, **fields: Any
    ) -> int:
        tensor = schema.TensorT()
        tensor.type, tensor.shape = getattr(schema.TensorType, dtype.upper()), list(shape)
        tensor.name = fields.pop("name", f"t{len(self.graph.tensors)}")
        if grid is not None:
            q = tensor.quantization = schema.QuantizationParametersT()
            q.scale = np.atleast_1d(np.asarray(grid.scale, np.float32))
            q.zeroPoint = np.broadcast_to(np.asarray(grid.zero_point, np.int64), q.scale.shape).copy()
            q.quantizedDimension = grid.axis
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.model.buffers.append(buffer)
            tensor.buffer = len(self.model.buffers) - 1
        for field, value in fields.items():
            setattr(tensor, field, value)
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def numbers(self, values: Any, dtype: str = "int32") -> int:
        held = np.asarray(values, dtype)
        return self.tensor(dtype, held.shape, None, held)

    def operator(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: str = "",
        intermediates: Sequence[int] = (),
        **fields: Any,
    ) -> None:
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), VERSIONS.get(name, 1)
        self.model.operatorCodes.append(code)
        operator = schema.OperatorT()
        operator.opcodeIndex = len(self.model.operatorCodes) - 1
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        operator.intermediates = list(intermediates) or None
        if options:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{options}Options")
            operator.builtinOptions = getattr(schema, f"{options}OptionsT")()
            for field, value in fields.items():
                assert hasattr(operator.builtinOptions, field), (options, field)
                setattr(operator.builtinOptions, field, value)
        self.graph.operators.append(operator)

    def to_bytes(self, inputs: Sequence[int], outputs: Sequence[int]) -> bytes:
        import flatbuffers

        self.graph.inputs, self.graph.outputs = list(inputs), list(outputs)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


VERSIONS = {"BROADCAST_TO": 2}
"""The first versions; all others begin at 1."""

RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}


class Models:
    """One file with many operators side by side, for codes of one type; an output has the name of its case.

    skip: cases to leave out. only: the one to take.
    """

    def __init__(self, dtype: str, seed: int = 0, skip: Sequence[str] = (), only: str | None = None) -> None:
        self.dtype, self.skip, self.only = dtype, skip, only
        self.file = File()
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.rng = np.random.default_rng(seed)
        self.low, self.high = RANGES[dtype]

    def to_bytes(self) -> bytes:
        return self.file.to_bytes(self.inputs, self.outputs)

    def takes(self, label: str) -> bool:
        return label not in self.skip and self.only in (None, label)

    def grid(self, scale: float | None = None) -> Grid:
        scale = float(self.rng.uniform(0.01, 0.2)) if scale is None else scale
        if self.dtype == "int16":
            return Grid(scale / 256)
        return Grid(scale, int(self.rng.integers(self.low + 40, self.high - 40)))

    def codes(self, shape: Sequence[int]) -> np.ndarray:
        return self.rng.integers(self.low, self.high + 1, shape).astype(self.dtype)

    def simple(
        self,
        label: str,
        name: str,
        shapes: Sequence[Sequence[int]],
        out: Sequence[int] | Sequence[Sequence[int]],
        options: str = "",
        numbers: Sequence[Any] = (),
        before: bool = False,
        same: bool = False,
        constant: int | None = None,
        out_dtype: str | None = None,
        x_grid: Grid | None = None,
        y_grid: Grid | None = None,
        **fields: Any,
    ) -> None:
        """Inputs of codes, then (or first) whole numbers; same: all on one grid; constant: that input has data.

        x_grid, y_grid: of all inputs, of the output, where they are given.
        """
        if not self.takes(label):
            return
        file = self.file
        grids = [x_grid or self.grid() for _ in shapes]
        if same:
            grids = [grids[0]] * len(shapes)
        data = [self.codes(shape) if i == constant else None for i, shape in enumerate(shapes)]
        inputs = [file.tensor(self.dtype, s, g, d) for s, g, d in zip(shapes, grids, data, strict=True)]
        extra = [file.numbers(n) for n in numbers]
        outs: Any = out if out and not isinstance(out[0], int) else [out]
        last = y_grid or (grids[0] if same else self.grid())
        if out_dtype is not None:
            low, high = RANGES[out_dtype]
            last = Grid(float(last.scale), 0 if out_dtype == "int16" else int(self.rng.integers(low + 40, high - 40)))
        outputs = [
            file.tensor(out_dtype or self.dtype, s, last, name=f"{label} {i}" if i else label)
            for i, s in enumerate(outs)
        ]
        file.operator(name, extra + inputs if before else inputs + extra, outputs, options, **fields)
        self.inputs += [i for k, i in enumerate(inputs) if k != constant]
        self.outputs += outputs

    def weighted(
        self,
        label: str,
        name: str,
        shape: Sequence[int],
        kernel: Sequence[int],
        out: Sequence[int],
        options: str,
        axis: int,
        per_channel: bool = True,
        bias: bool = True,
        first: Any = None,
        **fields: Any,
    ) -> None:
        """A product with weights: symmetric int8 with scales per channel, or uint8 with a zero point."""
        if not self.takes(label):
            return
        file = self.file
        x_grid, features = self.grid(), kernel[axis]
        depth = int(np.prod(kernel)) // features
        if self.dtype == "uint8":
            w_grid = Grid(0.01, int(self.rng.integers(60, 200)))
            codes = self.codes(kernel)
        else:
            scale = self.rng.uniform(0.005, 0.02, features) if per_channel else 0.01
            w_grid = Grid(np.asarray(scale, np.float32), 0, axis)
            codes = self.rng.integers(-127, 128, kernel).astype(np.int8)
        steps = np.float32(x_grid.scale) * np.asarray(w_grid.scale, np.float32)
        wide = "int64" if self.dtype == "int16" else "int32"
        high = 2**14 if self.dtype == "int16" else 64
        values = self.rng.integers(-high * depth, high * depth, features).astype(wide)
        x = file.tensor(self.dtype, shape, x_grid)
        w = file.tensor("uint8" if self.dtype == "uint8" else "int8", kernel, w_grid, codes)
        operands = [x, w] if first is None else [file.numbers(first), w, x]
        if bias:
            operands.append(file.tensor(wide, [features], Grid(steps), values))
        y_scale = float(np.max(steps)) * (self.high - self.low) * np.sqrt(depth) / 6
        y_grid = Grid(y_scale, self.grid().zero_point)
        y = file.tensor(self.dtype, out, y_grid, name=label)
        file.operator(name, operands, [y], options, **fields)
        self.inputs.append(x)
        self.outputs.append(y)
