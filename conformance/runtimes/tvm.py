"""TVM's q_multiply_shift, compiled by TVM: the default lowering, the one per axis, and the old one for NEON.

TVM 0.27 holds two lowerings of fixed-point multiplication (src/target/intrin_rule.cc), both into 64-bit integers:

- q_multiply_shift with constants M and s. M = 2^30, a power of two, takes a path of its own in *int32*: x << (s-1) for
  s > 1, else (x + 2^(-s)) >> (1-s), whose sum wraps. Every other M: (x * M + 2^(30-s)) >> (31-s), for s > 0
  ((x << s) * M + 2^30) >> 31, cast to int32, where a result out of range wraps.
- q_multiply_shift_per_axis with arrays M, l and r: the second formula for every M.

A third one was registered by TVM's Python for AArch64 (`_q_multiply_shift_arm` in topi/arm_cpu/tensor_intrin.py, up to
0.19) and left with Relay: on four lanes of int32 SQRDMULH and SRSHL, which round twice; any other shape kept the
default. `requantize_arm` registers it again, compiles for AArch64 and executes the object code.
"""

import functools
import importlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.runtimes.neon import aarch64_tools

RULES = ("tvm", "single_round", "neon")
"""The rules that TVM computes: by its default lowering, the one per axis, and the old one for NEON."""

_MAIN = Path(__file__).with_name("tvm_main.c")
_ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"], "keys": ["arm_cpu", "cpu"]}
_MOST_PAIRS = 4096


class Tvm:
    """Compiles and runs q_multiply_shift.

    Raises:
      ModuleNotFoundError: at the first use, where apache-tvm is not installed.
    """

    name = "tvm"

    def version(self) -> str:
        """The package and its version."""
        return f"apache-tvm {_tvm().__version__}"

    def requantize(self, rule: str, acc: Any, multiplier: Any, shift: Any) -> np.ndarray:
        """acc * multiplier * 2^(shift - 31) by the lowering that computes one of `RULES`, not clamped.

        "tvm": q_multiply_shift. "single_round": q_multiply_shift_per_axis, which wraps where the rule saturates.
        "neon": q_multiply_shift under the old lowering for NEON, four columns at a time, on AArch64.

        Args:
          rule: one of `RULES`.
          acc: int32, any shape.
          multiplier: int32, broadcasts to acc. "tvm" and "neon" compile one function for each pair of constants, and
            take at most 4,096 pairs.
          shift: int32, broadcasts to acc.

        Returns:
          int32 of the shape of acc.

        Raises:
          ValueError: another rule, too many pairs, or a pair that TVM does not compile: under "tvm" the multiplier 2^30
            with shift 1 (a factor of exactly 1) or -31.
        """
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}. Got {rule!r}.")
        arrays = _int32(acc, multiplier, shift)
        if rule == "single_round":
            return self._per_axis(*arrays)
        return self._default(*arrays) if rule == "tvm" else self._old_neon(*arrays)

    def _default(self, acc: np.ndarray, multiplier: np.ndarray, shift: np.ndarray) -> np.ndarray:
        tvm = _tvm()
        pairs, which = _pairs(multiplier, shift)
        _check_powers_of_two(pairs)
        functions = {f"f{i}": _dynamic_layer(f"f{i}", *pair) for i, pair in enumerate(pairs)}
        module = tvm.compile(tvm.IRModule(functions), target="llvm")
        result = np.empty(acc.shape, np.int32)
        for i in range(len(pairs)):
            chosen = which == i
            result[chosen] = _call(module[f"f{i}"], acc[chosen])
        return result

    def _per_axis(self, acc: np.ndarray, multiplier: np.ndarray, shift: np.ndarray) -> np.ndarray:
        tvm = _tvm()
        module = tvm.compile(tvm.IRModule({"f": _per_axis_layer("f")}), target="llvm")
        left, right = np.maximum(shift, 0), np.maximum(-shift, 0)
        return _call(module["f"], *(a.reshape(-1) for a in (acc, multiplier, left, right))).reshape(acc.shape)

    def _old_neon(self, acc: np.ndarray, multiplier: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Each pair's records as a layer of four columns; all layers have the rows of the longest."""
        pairs, which = _pairs(multiplier, shift)
        counts = np.bincount(which.ravel(), minlength=len(pairs))
        layers = np.zeros((len(pairs), 4 * -(-int(counts.max(initial=1)) // 4)), np.int32)
        for i, count in enumerate(counts):
            layers[i, :count] = acc[which == i]
        constants = np.array(pairs, np.int32).reshape(-1, 2).T
        answers = self.requantize_arm(layers.reshape(len(pairs), -1, 4), *constants).reshape(layers.shape)
        result = np.empty(acc.shape, np.int32)
        for i, count in enumerate(counts):
            result[which == i] = answers[i, :count]
        return result

    def requantize_arm(self, acc: Any, multiplier: Any, shift: Any, *, neon_lowering: bool = True) -> np.ndarray:
        """Layers compiled for AArch64 as TVM's arm_cpu schedule did: the innermost axis in vectors of four.

        Args:
          acc: int32, (layers, rows, columns). With a number of columns that is no multiple of four the vectors need a
            predicate and TVM compiles scalars.
          multiplier: int32, (layers,).
          shift: int32, (layers,).
          neon_lowering: whether `_q_multiply_shift_arm` is registered; without it every shape has the default.

        Returns:
          int32 of the shape of acc, not clamped.
        """
        acc = np.asarray(acc)
        if acc.ndim != 3:
            raise ValueError(f"acc must be of shape (layers, rows, columns). Got {acc.shape}.")
        acc, multiplier, shift = _int32(acc, np.reshape(multiplier, (-1, 1, 1)), np.reshape(shift, (-1, 1, 1)))
        with tempfile.TemporaryDirectory(prefix="qjax-tvm-") as folder:
            program = _link(Path(folder), self.arm_module(acc.shape, multiplier, shift, neon_lowering), len(acc))
            shape = [str(n) for n in acc.shape[1:]]
            done = subprocess.run(
                [*program, *shape], input=acc.astype("<i4").tobytes(), check=True, capture_output=True
            )
        return np.frombuffer(done.stdout, "<i4").astype(np.int32).reshape(acc.shape)

    def arm_assembly(self, columns: int, multiplier: int, shift: int, *, neon_lowering: bool = True) -> str:
        """The assembly that TVM makes of one such layer of 16 rows."""
        constants = np.full((1, 1, 1), multiplier, np.int32), np.full((1, 1, 1), shift, np.int32)
        return self.arm_module((1, 16, columns), *constants, neon_lowering).inspect_source("asm")

    def arm_module(self, shape: Sequence[int], multiplier: np.ndarray, shift: np.ndarray, neon_lowering: bool) -> Any:
        """The module of functions f0, f1, ... in AArch64 code, not loaded."""
        tvm = _tvm()
        lowering = _old_neon_lowering()
        functions = {
            f"f{i}": _arm_layer(f"f{i}", shape[1], shape[2], int(multiplier[i, 0, 0]), int(shift[i, 0, 0]))
            for i in range(shape[0])
        }
        lowering["on"] = neon_lowering
        try:
            return tvm.compile(tvm.IRModule(functions), target=tvm.target.Target(_ARM)).mod
        finally:
            lowering["on"] = False


def _tvm() -> Any:
    try:
        return importlib.import_module("tvm")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"running TVM needs the package apache-tvm. Got: {error}; pip install apache-tvm==0.27.0.post1"
        ) from error


def _int32(acc: Any, *constants: Any) -> tuple[np.ndarray, ...]:
    arrays = [np.int32(v) if isinstance(v, int) else np.asarray(v) for v in (acc, *constants)]
    for name, array in zip(("acc", "multiplier", "shift"), arrays, strict=True):
        if array.dtype != np.int32:
            raise TypeError(f"{name} must be int32. Got {array.dtype}.")
    return np.asarray(arrays[0]), *(np.broadcast_to(a, np.shape(arrays[0])) for a in arrays[1:])


def _pairs(multiplier: np.ndarray, shift: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The distinct pairs, and for each element the index of its own."""
    both, which = np.unique(np.stack([multiplier.ravel(), shift.ravel()]), axis=1, return_inverse=True)
    pairs = [(int(m), int(s)) for m, s in both.T]
    if len(pairs) > _MOST_PAIRS:
        raise ValueError(
            f"q_multiply_shift is compiled for each pair (multiplier, shift), at most {_MOST_PAIRS} of them. "
            f"Got {len(pairs)}; split the records, or take rule single_round, which reads arrays."
        )
    return pairs, which.reshape(multiplier.shape)


def _check_powers_of_two(pairs: list[tuple[int, int]]) -> None:
    for m, s in pairs:
        if m == 2**30 and s in (1, -31):
            raise ValueError(
                "TVM does not compile q_multiply_shift for multiplier 2^30 with shift 1 or -31: its path for powers "
                f"of two shifts by -1 or needs the constant 2^31. Got shift {s}; leave such records out."
            )


def _call(function: Any, *arrays: np.ndarray) -> np.ndarray:
    tvm = _tvm()
    output = tvm.runtime.empty(arrays[0].shape, "int32")
    function(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays), output)
    return output.numpy()


def _layer(x: Any, multiplier: int, shift: int) -> Any:
    tvm = _tvm()
    te, tirx = tvm.te, tvm.tirx
    constants = [tirx.const(v, "int32") for v in (multiplier, 31, shift)]
    return te.compute(x.shape, lambda *i: tirx.q_multiply_shift(x(*i), *constants), name="y")


def _dynamic_layer(name: str, multiplier: int, shift: int) -> Any:
    """A function of a vector of any length."""
    te = _tvm().te
    x = te.placeholder((te.var("n"),), "int32", name="x")
    return te.create_prim_func([x, _layer(x, multiplier, shift)]).with_attr("global_symbol", name)


def _per_axis_layer(name: str) -> Any:
    tvm = _tvm()
    te, tirx = tvm.te, tvm.tirx
    n = te.var("n")
    x, m, left, right = (te.placeholder((n,), "int32", name=a) for a in ("x", "m", "l", "r"))
    q, yes = tirx.const(31, "int32"), tirx.const(True, "bool")
    y = te.compute((n,), lambda i: tirx.q_multiply_shift_per_axis(x[i], m[i], left[i], right[i], q, yes, yes))
    return te.create_prim_func([x, m, left, right, y]).with_attr("global_symbol", name)


def _arm_layer(name: str, rows: int, columns: int, multiplier: int, shift: int) -> Any:
    """A function of a matrix under the schedule of arm_cpu's injective operators: split by 4, vectorize."""
    tvm = _tvm()
    x = tvm.te.placeholder((rows, columns), "int32", name="x")
    schedule = tvm.s_tir.Schedule(tvm.te.create_prim_func([x, _layer(x, multiplier, shift)]))
    _, column = schedule.get_loops(schedule.get_sblock("y"))
    _, lane = schedule.split(column, [None, 4])
    schedule.vectorize(lane)
    return schedule.mod["main"].with_attr("global_symbol", name)


@functools.cache
def _old_neon_lowering() -> dict[str, bool]:
    """Registers `_q_multiply_shift_arm` once for this process, and returns the switch that makes it act."""
    tirx, switch = _tvm().tirx, {"on": False}

    def intrinsic(name: str, a: Any, b: Any) -> Any:
        return tirx.call_llvm_pure_intrin("int32x4", f"llvm.aarch64.neon.{name}", a, b)

    def lower(op: Any) -> Any:
        x, y, q, s = op.args
        if not switch["on"] or str(x.ty) != "int32x4" or q.value != 31:
            return op
        negative = intrinsic("srshl", intrinsic("sqrdmulh", x, y), s)
        positive = intrinsic("sqrdmulh", x * (tirx.const(1, "int32x4") << s), y)
        return tirx.Select(s < tirx.const(0, "int32x4"), negative, positive)

    tirx.op.register_intrin_lowering("tirx.q_multiply_shift", target="llvm.aarch64", f=lower, level=99)
    return switch


def _link(folder: Path, module: Any, layers: int) -> tuple[str, ...]:
    """A static program of the module's object code and tvm_main.c, as the command that runs it."""
    compiler, *emulator = aarch64_tools()
    objects, program = str(folder / "layers.o"), str(folder / "layers")
    module.write_to_file(objects, "o")
    names = "-DLAYERS=" + " ".join(f"X(f{i})" for i in range(layers))
    done = subprocess.run(
        [compiler, "-O2", "-static", "-Wall", "-Werror", names, "-o", program, str(_MAIN), objects],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{compiler} could not link TVM's object code:\n{done.stderr}")
    return (*emulator, program)
