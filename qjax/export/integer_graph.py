"""What `convert` returns: a finished graph that runs, saves itself and prints."""

import functools
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax import targets
from qjax.assign.retarget import retarget
from qjax.export import artifact
from qjax.export.emit import emit
from qjax.graph import state as states
from qjax.graph.ir import PROFILE, UNCALIBRATED, Graph, Tensor
from qjax.graph.node_view import NodeView
from qjax.numerics.meshes import along_batch, in_automatic
from qjax.run import input_checks
from qjax.run.interpreter import Interpreter, check_shape, check_shapes, each
from qjax.run.quantize_io import (
    check_integers,
    dequantize_output,
    dequantize_outputs,
    inputs_of,
    integers_checked,
    quantize_input,
    quantize_inputs,
    result_of,
)
from qjax.support.extensions import Profile, Verdict, profiles
from qjax.support.progress import stage
from qjax.support.tables import table
from qjax.support.transfers import with_transfers
from qjax.support.user_frames import users_level

if TYPE_CHECKING:
    from qjax.export.native import Native


def _on_any_mesh(run: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    """A function of constants and inputs whose results are split like the inputs if explicit axes split the batch."""
    return lambda constants, inputs: in_automatic(run, (constants, inputs), along_batch(inputs))


class IntegerGraph:
    """A model of integers only, between a quantizer of its inputs and a dequantizer of its outputs.

    `graph(x)` takes and returns float arrays; `graph.run(codes)` is the integer part alone. Both are jitted, and pure
    JAX: they may be called inside jit, vmap and scan. Any batch size works.

    Args:
      graph: a program, as made by `convert`, `load` and `read`; you need not make one yourself.

    Examples:
      ```python
      codes = graph.quantize(x)  # integers, as the device reads them
      assert jnp.array_equal(graph.dequantize(graph.run(codes)), graph(x))
      print(graph)  # nodes, codes and bytes
      ```
    """

    def __init__(self, graph: Graph) -> None:
        self.ir = graph
        self.interpreter = Interpreter(graph)
        self._jitted = jax.jit(_on_any_mesh(self._real))
        self._step = jax.jit(_on_any_mesh(self._stepped))
        self._called: set[object] = set()

    def __reduce__(self) -> Any:
        # compiled functions cannot be pickled
        return IntegerGraph, (self.ir,)

    @property
    def target(self) -> str:
        """The name of the target whose rounding the graph has."""
        return self.ir.target

    @with_transfers
    def __call__(self, *inputs: Any) -> Any:
        """Real inputs to real outputs, in the structure of the model's own arguments and output.

        One array for each of the graph's inputs works as well. A Python value among the arguments (a flag, None) must
        be the one with which the model was converted, or be left out.

        Raises:
          TypeError, ValueError: other inputs than the graph's.
          ValueError: NaN or infinity in a concrete array, or an index for which the model returns NaN. Inside a trace
            NaN
            becomes the zero point, infinities saturate, and indices are clipped.
        """
        arrays = integers_checked(self.ir, inputs_of(self.ir, inputs))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        arrays = [jnp.asarray(x) for x in arrays]
        with self._compiling("call", arrays):
            outputs, *counts = self._jitted(self.interpreter.constants_near(arrays), arrays)
        input_checks.refuse(self.ir, *counts)
        return outputs

    @contextmanager
    def _compiling(self, method: str, arrays: Sequence[Any]) -> Generator[None]:
        """A line of progress during the first call of a method with these shapes, because only that one compiles."""
        known = method, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in arrays)
        if known in self._called:
            yield
            return
        with stage(f"compiling a graph of {len(self.ir.nodes)} nodes"):
            yield
        self._called.add(known)

    def _real(self, constants: Any, inputs: list[Any]) -> Any:
        wanted = [*self.ir.outputs, *input_checks.chosen_by(self.ir)]
        env = self.interpreter.tensors(constants, quantize_inputs(self.ir, inputs), wanted)
        counts = input_checks.input_faults(self.ir, inputs), input_checks.index_faults(self.ir, constants, env)
        return self.dequantize(*(env[name] for name in self.ir.outputs)), *counts

    @with_transfers
    def quantize(self, *inputs: Any) -> Any:
        """Codes of real inputs, passed as in a call: one array, or a tuple if the graph has several inputs.

        Raises:
          ValueError: NaN or infinity in a concrete array.
        """
        arrays = integers_checked(self.ir, inputs_of(self.ir, inputs))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        input_checks.refuse(self.ir, input_checks.input_faults(self.ir, arrays), {})
        codes = in_automatic(lambda arrays: quantize_inputs(self.ir, arrays), (arrays,), along_batch(arrays))
        return codes[0] if len(codes) == 1 else tuple(codes)

    @with_transfers
    def run(self, *codes: Any) -> Any:
        """Codes to codes: the integer part by itself. It also takes the tuple that `quantize` returns."""
        arrays = each(codes)
        with self._compiling("run", arrays):
            outputs = self.interpreter(*arrays)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @with_transfers
    def dequantize(self, *codes: Any) -> Any:
        """Real outputs of output codes, in the structure of the model's own output."""
        codes = each(codes)
        if len(codes) != len(self.ir.outputs):
            raise TypeError(
                f"The graph has {len(self.ir.outputs)} outputs ({', '.join(self.ir.outputs)}), got {len(codes)}."
            )
        return in_automatic(lambda codes: dequantize_outputs(self.ir, codes), (codes,), along_batch(codes))

    @with_transfers
    def state(self, values: Any = None, *, batch: int = 1) -> Any:
        """A state as codes, for `step`, of a graph that was converted with `state=...`.

        Args:
          values: the state in the model's form; None: zeros. batch: of the zeros.

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

    @with_transfers
    def step(self, state: Any, *inputs: Any) -> tuple[Any, Any]:
        """One call that takes and returns the state as codes: (the other results of the model, the next state).

        It computes what `graph(...)` computes, but the state is neither dequantized nor quantized between two calls. It
        is pure JAX and may be jitted and scanned.

        Args:
          state: from `graph.state` or an earlier step, also one of another graph of the same quantized model.
          inputs: the model's other arguments, in its order.

        Raises:
          ValueError: the graph has no state; NaN, infinity, an index out of range, as in a call; codes that the state's
            bits do not have. TypeError: a state of other dtypes.
        """
        where = states.where(self.ir)
        if len(inputs) < where.argument:
            raise TypeError(f"step: expected at least {where.argument} arguments besides the state, got {len(inputs)}.")
        args = (*inputs[: where.argument], state, *inputs[where.argument :])
        arrays = integers_checked(self.ir, inputs_of(self.ir, args))
        check_shapes(self.ir, [tuple(np.shape(x)) for x in arrays])
        check_integers(self.ir, arrays)
        arrays = [jnp.asarray(x) for x in arrays]
        for name, x in zip(self.ir.inputs, arrays, strict=True):
            if name in self._state_inputs and str(x.dtype) != self.ir.tensors[name].dtype:
                raise TypeError(
                    f"The state's array {name!r}: expected codes of dtype {self.ir.tensors[name].dtype}, got "
                    f"{x.dtype}. graph.state(values) quantizes floats."
                )
        with self._compiling("step", arrays):
            result, counts = self._step(self.interpreter.constants_near(arrays), arrays)
        input_checks.refuse(self.ir, *counts)
        return where.split(result)

    def _stepped(self, constants: Any, arrays: list[Any]) -> Any:
        codes = quantize_inputs(self.ir, arrays, self._state_inputs)
        env = self.interpreter.tensors(constants, codes, [*self.ir.outputs, *input_checks.chosen_by(self.ir)])
        kept = {part.output for part in states.parts(self.ir)}
        leaves = [
            env[name] if position in kept else dequantize_output(self.ir, name, env[name])
            for position, name in enumerate(self.ir.outputs)
        ]
        counts = input_checks.input_faults(self.ir, arrays), input_checks.index_faults(self.ir, constants, env)
        return result_of(self.ir, leaves), (*counts, input_checks.code_faults(self.ir, arrays, self._state_inputs))

    @functools.cached_property
    def _state_inputs(self) -> frozenset[str]:
        """The inputs that remain codes in a step."""
        return frozenset(part.input for part in states.parts(self.ir) if part.input is not None)

    @with_transfers
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph to one file, atomically; `qjax.load` reads it.

        A file does not know the user's own classes: if the model takes or returns one, the loaded graph has a dict of
        its fields instead.
        """
        artifact.save(self.ir, path)

    @with_transfers
    def emit(
        self,
        format: str,
        path: str | os.PathLike[str],
        *,
        profile: str | Profile | None = None,
        **options: Any,
    ) -> None:
        """Write the graph for a runtime: "onnx", "tflite", "c", "stablehlo", "pte" or "rtl"; see `qjax.export.emit`.

        Args:
          profile: the device for which the file is. Its options of the emitter are used, and the file is written only
            if it breaks no rule. None: that of the model's recipe, if `format` is the one of its device.

        Raises:
          ProfileError: rules are broken, or an option contradicts the profile; the message lists all.
        """
        if profile is not None or PROFILE in self.ir.metadata:
            options = profiles().check_options(self.ir, format, profile, options)
        blind = self.ir.metadata.get(UNCALIBRATED)
        if blind:
            names = ", ".join(map(repr, blind[:4])) + (", ..." if len(blind) > 4 else "")
            warnings.warn(
                f"emit: the ranges of {len(blind)} quantizers ({names}) come from a single number each, so codes of "
                "other data are clipped. Call qjax.calibrate(qmodel, batches) with real data, and convert again.",
                stacklevel=users_level(),
            )
        emit(self.ir, format, path, **options)

    @with_transfers
    def native(self, batch: int = 1, *, threads: int = 1) -> "Native":
        """The integer part as machine code: `graph.native(batch).run(codes)` is `graph.run(codes)`, bit for bit.

        It is the C of `graph.emit("c", folder, simd=True)`, compiled for this machine by the compiler that the variable
        CC names, or by cc, gcc or clang. It is not JAX: it takes and returns numpy arrays.

        Args:
          batch: the number of examples in one call.
          threads: how many threads share the work of one call, by OpenMP. The codes are the same with any number. After
            a
            call with several threads, a forked process cannot call it again and raises an error.

        Raises:
          FileNotFoundError: no compiler. RuntimeError: it fails. OSError: on Windows.
          ValueError: the graph contains what has no form in C, or threads is no whole number of at least 1.
        """
        from qjax.export.native import Native

        with stage("native"):
            return Native(self.ir, batch, self.interpreter, threads)

    @with_transfers
    def check(self, profile: str | Profile) -> Verdict:
        """Judge the graph by a device's demands; `str()` of the verdict lists every violation with its cure.

        The verdict is about the operators of the file that the profile's emitter writes.

        Raises:
          ValueError: an unknown profile. ModuleNotFoundError: the library that writes the format is missing.
        """
        return profiles().check_graph(self.ir, profile)

    @with_transfers
    def retarget(self, target: str | targets.Target) -> "IntegerGraph":
        """The same model under the rounding of another target; see `qjax.assign.retarget`."""
        with stage("retarget"):
            return IntegerGraph(retarget(self.ir, target))

    @with_transfers
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

    It takes and returns dicts, lists and tuples: each of the user's own classes is a dict of its fields.

    Args:
      path: of a file that `IntegerGraph.save` wrote.

    Examples:
      ```python
      graph.save("model.qjax")
      again = qjax.load("model.qjax")
      assert jnp.array_equal(again(x), graph(x))
      ```
    """
    with stage("load"):
        return IntegerGraph(artifact.load(path, **limits))


def _grid(tensor: Tensor) -> tuple[str, str]:
    q = tensor.quantization
    if q is None:
        return "", ""
    return f"{float(np.asarray(q.scale)):.6g}", str(int(np.asarray(q.zero_point)))
