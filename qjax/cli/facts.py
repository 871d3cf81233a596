"""The tables of `qjax inspect` and `qjax read`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.reporting.facts import facts as facts
from qjax.support.tables import table


def heading(found: Mapping[str, Any], title: str) -> str:
    """The model's name, its target, its inputs and outputs."""
    lines = [f"{title}: target {found['target']}, {found['totals']['nodes']} nodes"]
    lines += [f"  input  {_signature(tensor)}" for tensor in found["inputs"]]
    lines += [f"  output {_signature(tensor)}" for tensor in found["outputs"]]
    return "\n".join(lines)


def _signature(tensor: Mapping[str, Any]) -> str:
    text = f"{tensor['name']}: {tensor['dtype']} {shape_text(tensor['shape'])}"
    if tensor["scale"] is None:
        return f"{text}, no scale"
    low, high = tensor["codes"]
    text += f", scale {_span(tensor['scale'])}, zero point {_span(tensor['zero_point'])}, codes {low}..{high}"
    return text if tensor["reals"] is None else f"{text}, values {tensor['reals'][0]:.6g}..{tensor['reals'][1]:.6g}"


def node_table(found: Mapping[str, Any]) -> str:
    """One line per node."""
    header = ("node", "op", "inputs", "shape", "dtype", "scale", "zero", "method")
    header += ("bytes", "MACs", "accumulator", "bits", "headroom")
    rows: list[Sequence[Any]] = []
    for node in found["nodes"]:
        row = [node["name"], node["op"], ", ".join(node["inputs"]), shape_text(node["shape"]), node["dtype"]]
        row += [_span(node["scale"]), _span(node["zero_point"]), _dash(node["method"]), node["constant_bytes"]]
        row += [node["macs"] or "-", _dash(node["accumulator"]), _dash(node["accumulator_bits"])]
        rows.append([*row, _dash(node["headroom"])])
    return table(header, rows)


def tensor_table(found: Mapping[str, Any]) -> str:
    """One line per tensor, constants included."""
    header = ("tensor", "kind", "dtype", "shape", "scale", "axes", "zero", "codes", "bytes")
    ends = {tensor["name"]: "input" for tensor in found["inputs"]}
    ends |= {tensor["name"]: "output" for tensor in found["outputs"]}
    rows: list[Sequence[Any]] = []
    for tensor in found["tensors"]:
        kind = "constant" if tensor["constant"] else ends.get(tensor["name"], "activation")
        codes = "-" if tensor["codes"] is None else f"{tensor['codes'][0]}..{tensor['codes'][1]}"
        axes = ", ".join(map(str, tensor["axes"] or ())) or "-"
        row = [tensor["name"], kind, tensor["dtype"], shape_text(tensor["shape"]), _span(tensor["scale"]), axes]
        rows.append([*row, _span(tensor["zero_point"]), codes, tensor["bytes"]])
    return table(header, rows)


def totals(found: Mapping[str, Any]) -> str:
    """Two lines: the work of the model, and its memory."""
    t = found["totals"]
    batch = f"a batch of {t['batch']}"
    return (
        f"for {batch}: {t['macs']:,} MACs, at most {t['peak_activation_bytes']:,} bytes of activations alive\n"
        f"constants: {t['packed_bytes']:,} bytes in a file ({t['weight_bytes']:,} of weights), "
        f"{t['constant_bytes']:,} in memory"
    )


def shape_text(shape: Sequence[int | None]) -> str:
    """A shape as 3x3x16, with the batch axis by name."""
    return "x".join("batch" if size is None else str(size) for size in shape) or "scalar"


def _dash(value: Any) -> Any:
    return "-" if value is None else value


def _span(values: Any) -> str:
    if values is None:
        return "-"
    array = np.asarray(values)
    if not array.size:
        return "none"
    text = "{:.6g}".format if array.dtype.kind == "f" else str
    low, high = text(array.min()), text(array.max())
    return low if low == high else f"{low} .. {high}"
