"""What `convert` returns: a finished graph that runs, saves itself and prints."""

import functools
import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import profiles, targets
from qjax.assign.retarget import retarget
from qjax.export import artifact, contents
from qjax.export.emit import emit
from qjax.export.read import read as read_file
from qjax.graph import state as states
from qjax.graph.ir import REAL_DTYPE, Graph, Tensor
from qjax.graph.structure import flatten_arguments, is_leaf, is_static, plain, rebuild
from qjax.graph.view import NodeView
from qjax.numerics.affine import QParams, QSpec, dequantize, quantize
from qjax.numerics.output_dequantization import OutputDequantization
from qjax.numerics.unfused import unfused
from qjax.progress import stage
from qjax.run import faults
from qjax.run.interpreter import Interpreter, check_count, check_shape, check_shapes
from qjax.summary import table
from qjax.tracing import Integers


class IntegerGraph:
    """A model of integers only, between a quantizer of its inputs and a dequantizer of its outputs.

    `graph(x)` takes and returns float arrays; `graph.run(codes)` is the integer part alone. Both are jitted, and pure
    JAX: they may be called inside jit, vmap and scan. Any batch size.

    Args:
      graph: a program, as `convert`, `load` and `read` make it; you need not make one yourself.
    """

    def __init__(self, graph: Graph) -> None:
        self.ir = graph
        self.interpreter = Interpreter(graph)
        self._jitted = jax.jit(self._real)
        self._step = jax.jit(self._stepped)
        self._called: set[Any] = set()

    def __reduce__(self) -> Any:
        # compiled functions cannot be pickled
        return IntegerGraph, (self.ir,)

    @property
    def target(self) -> str:
        """The name of the target whose rounding the graph obeys."""
        return self.ir.target

    def __call__(self, *inputs: Any) -> Any:
        """Real inputs to real outputs, in the structure of the model's own arguments and output.

        One array for each of the graph's inputs will do as well. A Python value among the arguments (a flag, None) must
        be the one that the model was converted with, or be left out.

        Raises:
          TypeError, ValueError: other inputs than the graph's.
          ValueError: NaN or infinity in a concrete array, or an index for which the model gives NaN. Inside a trace NaN
            takes the zero point, infinities saturate, and indices are clipped.
        """
        arrays = integers_checked(self.ir, inputs_of(self.ir, inputs))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        arrays = [jnp.asarray(x) for x in arrays]
        known = tuple((x.shape, x.dtype) for x in arrays)
        # only the first call of a shape compiles
        with nullcontext() if known in self._called else stage(f"compiling a graph of {len(self.ir.nodes)} nodes"):
            outputs, *counts = self._jitted(self.interpreter.constants, arrays)
        self._called.add(known)
        faults.refuse(self.ir, *counts)
        return outputs

    def _real(self, constants: Any, inputs: list[Any]) -> Any:
        wanted = [*self.ir.outputs, *faults.chosen_by(self.ir)]
        env = self.interpreter.tensors(constants, quantize_inputs(self.ir, inputs), wanted)
        counts = faults.input_faults(self.ir, inputs), faults.index_faults(self.ir, constants, env)
        return self.dequantize(*(env[name] for name in self.ir.outputs)), *counts

    def quantize(self, *inputs: Any) -> Any:
        """Codes of real inputs, given as to a call: one array, or a tuple where the graph has several inputs.

        Raises:
          ValueError: NaN or infinity in a concrete array.
        """
        arrays = integers_checked(self.ir, inputs_of(self.ir, inputs))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        faults.refuse(self.ir, faults.input_faults(self.ir, arrays), {})
        codes = quantize_inputs(self.ir, arrays)
        return codes[0] if len(codes) == 1 else tuple(codes)

    def run(self, *codes: Any) -> Any:
        """Codes to codes: the integer part by itself."""
        outputs = self.interpreter(*codes)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def dequantize(self, *codes: Any) -> Any:
        """Real outputs of output codes, in the structure of the model's own output."""
        if len(codes) == 1 and isinstance(codes[0], tuple):
            codes = codes[0]
        if len(codes) != len(self.ir.outputs):
            raise TypeError(
                f"The graph has {len(self.ir.outputs)} outputs ({', '.join(self.ir.outputs)}), got {len(codes)}."
            )
        return dequantize_outputs(self.ir, codes)

    def state(self, values: Any = None, *, batch: int = 1) -> Any:
        """A state as codes, for `step`, of a graph that was converted with `state=...`.

        Args:
          values: the state as the model takes it; None: zeros. batch: of the zeros.

        Raises:
          ValueError: the graph has no state. TypeError, ValueError: another structure or other shapes.
        """
        where, parts = states.where(self.ir), states.parts(self.ir)
        if values is None:
            shapes = [[batch if n is None else n for n in part.tensor(self.ir).shape] for part in parts]
            arrays = [np.zeros(shape, np.float32) for shape in shapes]
        else:
            states.check(self.ir, values, where)
            arrays = states.arrays_of(values)
        codes: list[Any] = []
        for part, x in zip(parts, arrays, strict=True):
            tensor = part.tensor(self.ir)
            check_shape(tensor.name, tensor.shape, tuple(np.shape(x)))
            if values is None and tensor.quantization is None:
                codes.append(jnp.zeros(np.shape(x), tensor.dtype))
            else:
                codes.append(quantize_input(self.ir, tensor, x))
        return states.tree_of(self.ir, codes)

    def step(self, state: Any, *inputs: Any) -> tuple[Any, Any]:
        """One call that takes the state as codes and returns it so: (what else the model returns, the next state).

        It computes what `graph(...)` computes, but the state is neither dequantized nor quantized between two calls.
        Pure JAX: may be jitted and scanned.

        Args:
          state: from `graph.state` or an earlier step, also one of another graph of the same quantized model.
          inputs: the model's other arguments, in its order.

        Raises:
          ValueError: the graph has no state; NaN, infinity, an index out of range, as in a call; codes that the state's
            bits do not have. TypeError: a state of other dtypes.
        """
        where = states.where(self.ir)
        if len(inputs) < where.argument:
            raise TypeError(f"step: expected at least {where.argument} arguments beside the state, got {len(inputs)}.")
        args = (*inputs[: where.argument], state, *inputs[where.argument :])
        arrays = integers_checked(self.ir, inputs_of(self.ir, args))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        arrays = [jnp.asarray(x) for x in arrays]
        for name, x in zip(self.ir.inputs, arrays, strict=True):
            if name in self._kept and str(x.dtype) != self.ir.tensors[name].dtype:
                raise TypeError(
                    f"The state's part {name!r}: expected codes of dtype {self.ir.tensors[name].dtype}, got {x.dtype}. "
                    "graph.state(values) makes codes of floats."
                )
        result, counts = self._step(self.interpreter.constants, arrays)
        faults.refuse(self.ir, *counts)
        return where.split(result)

    def _stepped(self, constants: Any, arrays: list[Any]) -> Any:
        codes = quantize_inputs(self.ir, arrays, self._kept)
        env = self.interpreter.tensors(constants, codes, [*self.ir.outputs, *faults.chosen_by(self.ir)])
        kept = {part.output for part in states.parts(self.ir)}
        leaves = [
            env[name] if position in kept else dequantize_output(self.ir, name, env[name])
            for position, name in enumerate(self.ir.outputs)
        ]
        counts = faults.input_faults(self.ir, arrays), faults.index_faults(self.ir, constants, env)
        return _result(self.ir, leaves), (*counts, faults.code_faults(self.ir, arrays, self._kept))

    @functools.cached_property
    def _kept(self) -> frozenset[str]:
        """The inputs that are codes in a step."""
        return frozenset(part.input for part in states.parts(self.ir) if part.input is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph to one file, atomically; `qjax.load` reads it.

        A file knows no classes of the user's own: where the model takes or returns one, the loaded graph has a dict of
        its fields.
        """
        artifact.save(self.ir, path)

    def emit(
        self,
        format: str,
        path: str | os.PathLike[str],
        *,
        profile: str | profiles.Profile | None = None,
        **options: Any,
    ) -> None:
        """Write the graph for a runtime: "onnx", "tflite", "c" or "stablehlo"; see `qjax.export.emit`.

        Args:
          profile: the device that the file is for. Its options of the emitter are taken, and the file is written only
            if it breaks no rule. None: that of the model's recipe, where `format` is the one of its device.

        Raises:
          ProfileError: rules are broken, or an option contradicts the profile; the message lists all.
        """
        known = contents.profile_for(self.ir, format, profile)
        if known is not None:
            options = contents.options_for(known, options)
            contents.check_graph(self.ir, known, options=options).refuse("emit")
        emit(self.ir, format, path, **options)

    def check(self, profile: str | profiles.Profile) -> profiles.Verdict:
        """Judge the graph by what a device demands; `str()` of the verdict lists every violation with its cure.

        Judged are the operators of the file that the profile's emitter writes.

        Raises:
          ValueError: an unknown profile. ModuleNotFoundError: the library that writes the format is missing.
        """
        return contents.check_graph(self.ir, profile)

    def retarget(self, target: str | targets.Target) -> "IntegerGraph":
        """The same model under the rounding of another target; see `qjax.assign.retarget`."""
        with stage("retarget"):
            return IntegerGraph(retarget(self.ir, target))

    def jaxpr(self, batch: int = 1) -> Any:
        """The jaxpr of the integer part for a batch of that size."""
        inputs = [
            np.zeros([batch if n is None else n for n in self.ir.tensors[name].shape], self.ir.tensors[name].dtype)
            for name in self.ir.inputs
        ]
        return self.interpreter.jaxpr(*inputs)

    def __str__(self) -> str:
        rows = []
        for node in self.ir.nodes:
            out = self.ir.tensors[node.output]
            shape = "x".join("batch" if n is None else str(n) for n in out.shape)
            view = NodeView(self.ir, node)
            rows.append([node.name, view.kind, ", ".join(node.inputs), shape, out.dtype, *_grid(out), view.arithmetic])
        header = ("node", "op", "inputs", "shape", "dtype", "scale", "zero point", "computed in")
        size = sum(int(np.size(t.value)) * np.dtype(t.dtype).itemsize for t in self.ir.constants())
        fixed = ", fixed batch" if self.ir.metadata.get("batch") == "fixed" else ""
        return (
            table(header, rows)
            + f"\ntarget {self.target}, {len(rows)} nodes, {size} bytes of constants in memory{fixed}"
        )

    def __repr__(self) -> str:
        return f"<IntegerGraph: {len(self.ir.nodes)} nodes, target {self.target}>"


def load(path: str | os.PathLike[str], **limits: Any) -> IntegerGraph:
    """Read a graph that `save` wrote. Nothing in the file is executed.

    It takes and returns dicts, lists and tuples: a dict of the fields for every class of the user's own.

    Args:
      path: of a file that `IntegerGraph.save` wrote.
    """
    with stage("load"):
        return IntegerGraph(artifact.load(path, **limits))


def read(path: str | os.PathLike[str], target: str | targets.Target | None = None, **options: Any) -> IntegerGraph:
    """A pre-quantized .tflite or .onnx model as a graph like any other; see `qjax.export.read.read` for the options.

    Args:
      path: the file.
      target: whose rounding the graph obeys; None: that of the file (of a file that qjax wrote), else the format's own
        runtime: onnxruntime, tflite_reference.
    """
    with stage("read"):
        return IntegerGraph(read_file(path, target, **options))


def inputs_of(ir: Graph, args: tuple[Any, ...]) -> list[Any]:
    """The arrays of a call in the order of `ir.inputs`.

    Args:
      args: as the model takes them, or one array per input.
    """
    structure = ir.metadata.get("input_structure")
    plain = len(args) == len(ir.inputs) and all(is_leaf(x) and not is_static(x) for x in args)
    flat = structure is not None and all(isinstance(item, int) for item in structure[1])
    if structure is None or plain or (flat and len(args) != len(ir.inputs)):
        check_count(ir, args)
        return list(args)
    return flatten_arguments(structure, args if ir.call is None else ir.call.without_classes(args), len(ir.inputs))


def integers_checked(ir: Graph, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, with concrete integers beyond int32, which JAX would cut to their low bits, refused."""
    for name, x in zip(ir.inputs, inputs, strict=True):
        if not isinstance(x, Tracer) and np.issubdtype(getattr(x, "dtype", np.int8), np.integer):
            if jnp.can_cast(x.dtype, np.int32):
                continue
            known = np.asarray(x)
            if known.size and (known.min() < -(2**31) or known.max() >= 2**31):
                raise ValueError(
                    f"Input {name!r}: expected integers within int32, got {known.min()} to {known.max()}. "
                    "Check where they come from; a graph counts in 32 bits."
                )
    return list(inputs)


def check_integers(ir: Graph, arrays: Sequence[Any]) -> None:
    """Raise where integers lie outside of the range that a table of a function of them has."""
    ranges: list[Any] = ir.metadata.get("integers") or []
    for name, x, known in zip(ir.inputs, arrays, ranges, strict=False):
        if known is not None:
            Integers(name, int(known[0]), int(known[1])).check(name, x)


def quantize_inputs(ir: Graph, inputs: Sequence[Any], kept: Collection[str] = ()) -> list[jax.Array]:
    """Codes of real inputs, in the order of `ir.inputs`; index inputs pass as integers. kept: those that are codes."""
    pairs = zip(ir.inputs, inputs, strict=True)
    return [jnp.asarray(x) if name in kept else quantize_input(ir, ir.tensors[name], x) for name, x in pairs]


def quantize_input(ir: Graph, tensor: Tensor, x: Any) -> jax.Array:
    """Codes of one real input."""
    x = jnp.asarray(x)
    if tensor.quantization is not None:
        return quantize(x, qparams_of(tensor), quantization=ir.quantization).astype(tensor.dtype)
    if tensor.dtype == REAL_DTYPE and jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(tensor.dtype)  # A float part of the model reads it unquantized.
    if jnp.issubdtype(x.dtype, jnp.bool_ if tensor.dtype == "bool" else jnp.integer):
        return x if tensor.dtype == "bool" else _within(x, tensor.dtype)
    kind = "booleans" if tensor.dtype == "bool" else "integers"
    raise TypeError(f"Input {tensor.name!r}: expected {kind}, got {x.dtype}.")


def _within(x: jax.Array, dtype: str) -> jax.Array:
    """Integers in another dtype; what does not fit becomes its greatest or least, not its low bits."""
    own, wanted = np.iinfo(x.dtype), np.iinfo(dtype)
    low, high = max(own.min, wanted.min), min(own.max, wanted.max)
    if (low, high) != (own.min, own.max):
        x = jnp.clip(x, np.asarray(low, x.dtype), np.asarray(high, x.dtype))
    return x.astype(dtype)


def dequantize_outputs(ir: Graph, codes: Sequence[Any]) -> Any:
    """Real outputs, in the structure of the model's own output."""
    return _result(ir, [dequantize_output(ir, name, c) for name, c in zip(ir.outputs, codes, strict=True)])


def dequantize_output(ir: Graph, name: str, codes: Any) -> Any:
    """The codes of one tensor as real numbers; integers and booleans without a scale as they are."""
    return _reals(ir.tensors[name], codes, ir.dequantization)


def _result(ir: Graph, leaves: Sequence[Any]) -> Any:
    """What the model returns, with `leaves` for the graph's outputs."""
    if ir.call is not None:
        return ir.call.result(leaves)
    structure = ir.metadata.get("output_structure")
    return rebuild(structure, leaves) if structure is not None else leaves[0] if len(leaves) == 1 else tuple(leaves)


def outputs_of(ir: Graph, returned: Any) -> list[Any]:
    """The arrays of a model's result that the graph computes, in the order of `ir.outputs`."""
    places = jax.tree.leaves(plain(_result(ir, range(len(ir.outputs)))))
    leaves = jax.tree.leaves(plain(returned))
    found = {place: leaf for place, leaf in zip(places, leaves, strict=True) if isinstance(place, int)}
    return [found[index] for index in range(len(ir.outputs))]


def _reals(tensor: Tensor, codes: Any, dequantization: OutputDequantization) -> Any:
    q = tensor.quantization
    if q is None:
        return codes  # Plain integers, not codes.
    if np.dtype(tensor.dtype).itemsize <= 2:
        return dequantize(codes, qparams_of(tensor), dequantization=dequantization)
    # The output is an accumulator, whose codes are wider than any spec has.
    steps = jnp.asarray(codes).astype(jnp.int32) - jnp.asarray(q.zero_point)
    return unfused(steps.astype(jnp.float32) * jnp.asarray(q.scale))


def qparams_of(tensor: Tensor) -> QParams:
    """A tensor's quantization as `QParams`."""
    q = tensor.quantization
    assert q is not None
    signed = q.qmin < 0
    bits = (q.qmax + 1).bit_length() if signed else q.qmax.bit_length()
    spec = QSpec(bits=bits, signed=signed, symmetric=False, narrow_range=signed and q.qmin == -q.qmax)
    return QParams(jnp.asarray(q.scale), jnp.asarray(q.zero_point), spec)


def _grid(tensor: Tensor) -> tuple[str, str]:
    q = tensor.quantization
    if q is None:
        return "", ""
    return f"{float(np.asarray(q.scale)):.6g}", str(int(np.asarray(q.zero_point)))
