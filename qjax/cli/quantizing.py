"""The steps of `qjax quantize`: the float module, its calibration data, quantization, and the comparison with float."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import qjax
from qjax import targets
from qjax.cli import arrays
from qjax.cli.errors import Refused, refusing
from qjax.cli.models import kind
from qjax.export.emit.tflite.support import RUNTIMES
from qjax.export.integer_graph import IntegerGraph

Batches = list[tuple[Any, ...]]


def recipe_of(target: str, bits: int, activation_bits: int, format: str) -> qjax.Recipe:
    """The recipe; 16-bit activations are symmetric, as runtimes need them.

    Raises:
      ValueError: the target is unknown, or its codes cannot be in a file of this format.
    """
    targets.get(target)
    if format == "tflite" and target not in RUNTIMES:
        raise ValueError(
            f"target {target!r} is no runtime of .tflite files, which contain no rounding: choose one of "
            f"{', '.join(RUNTIMES)}, or write .onnx or .qjax, which hold the rounding of any target."
        )
    weights = qjax.QSpec(bits=bits, axis=-1)
    return qjax.Recipe(
        target=target, weights=weights, activations=qjax.QSpec(bits=activation_bits, symmetric=activation_bits > 8)
    )


def open_float(path: str, signature: str | None) -> Any:
    """The module of a float file: `qjax.contrib.float_models.FileModule`.

    Raises:
      Refused: no such file; it is damaged, quantized, of another kind, or has operators that are not supported.
    """
    with refusing():
        found = kind(path)
    if found == "qjax":
        raise Refused(f"{path}: expected a float .onnx or .tflite model, got a quantized graph: give the float model.")
    if signature is not None and found != "tflite":
        raise Refused(f"--signature: {path} is an .onnx file, and only .tflite files have signatures: leave it out.")
    with refusing():
        return qjax.from_onnx(path) if found == "onnx" else qjax.from_tflite(path, signature=signature)


def examples_of(module: Any, paths: Sequence[str], size: int) -> Batches:
    """The calibration data in batches.

    Raises:
      Refused: other names, dtypes or shapes than the model's; no example; NaN; or data that hold one number only.
    """
    names = module.input_names
    with refusing():
        found = arrays.read(paths, names)
    for port, array in zip(module.inputs, found, strict=True):
        place = f"input {port.name!r}"
        if array.dtype.name != port.dtype:
            raise Refused(
                f"{place}: expected {port.dtype}, got {array.dtype}: array.astype(np.{port.dtype}), if that keeps the "
                "numbers that the model was trained on."
            )
        if port.dims is not None and (
            len(port.dims) != array.ndim
            or any(i and n is not None and n != m for i, (n, m) in enumerate(zip(port.dims, array.shape, strict=True)))
        ):
            wanted = "x".join(["examples", *("any" if n is None else str(n) for n in port.dims[1:])])
            got = "x".join(map(str, array.shape)) or "one number"
            raise Refused(
                f"{place}: expected an array of {wanted}, got {got}: one example per row, as the model has it."
            )
        if array.size == 0:
            raise Refused(f"{place}: the files hold no example: expected a batch of at least 1.")
        if array.dtype.kind == "f":
            if not np.isfinite(array).all():
                raise Refused(f"{place}: the data hold NaN or infinite numbers: remove these examples.")
            if array.size > 1 and (array == array.flat[0]).all():
                raise Refused(
                    f"{place}: every number is {array.flat[0]}, so the data have no range to calibrate with: give "
                    "examples as the model will see them."
                )
    counts = {array.shape[0] for array in found if array.ndim}
    if len(counts) > 1:
        raise Refused(
            f"the inputs hold {', '.join(str(n) for n in sorted(counts))} examples: expected the same number in each."
        )
    count = counts.pop() if counts else 1
    return [tuple(a[i : i + size] if a.ndim else a for a in found) for i in range(0, count, size)]


def quantized(
    module: Any, recipe: qjax.Recipe, batches: Batches, effort: str
) -> tuple[qjax.QuantizedModel, IntegerGraph]:
    """The quantized model and its graph."""
    if effort == "none":
        qmodel = qjax.quantize(module, recipe, batches[0])
        qjax.calibrate(qmodel, batches)
    else:
        qmodel = qjax.post_training(module, recipe, batches, effort=effort)  # pyright: ignore[reportArgumentType]
    return qmodel, qjax.convert(qmodel, batches[0])


def compare(module: Any, graph: IntegerGraph, batches: Batches) -> list[dict[str, Any]]:
    """For each output: the ratio of signal to noise, the largest error, how often the greatest class is the same."""
    sides: list[list[list[np.ndarray]]] = [[], []]
    for batch in batches:
        for side, function in zip(sides, (module, graph), strict=True):
            side.append([np.asarray(leaf) for leaf in jax.tree.leaves(function(*batch))])
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(module.leaf_names):
        pairs = [(a[index], b[index]) for a, b in zip(*sides, strict=True)]
        errors = [a.astype(np.float64) - b.astype(np.float64) for a, b in pairs]
        noise = sum(float((error**2).sum()) for error in errors)
        signal = sum(float((a.astype(np.float64) ** 2).sum()) for a, _ in pairs)
        classes = pairs[0][0].ndim == 2 and pairs[0][0].shape[1] > 1 and pairs[0][0].dtype.kind == "f"
        same = np.concatenate([a.argmax(1) == b.argmax(1) for a, b in pairs]).mean() if classes else None
        rows.append(
            {
                "name": name,
                "sqnr_db": 10 * math.log10(signal / noise) if signal and 0 < noise < math.inf else None,
                "equal": noise == 0,
                "max_error": max(float(np.abs(error).max()) for error in errors),
                "same_class": None if same is None else float(same),
            }
        )
    return rows


def write(graph: IntegerGraph, format: str, path: str) -> None:
    """Write the graph, all or nothing."""
    if format == "qjax":
        graph.save(path)
    else:
        graph.emit(format, path)
