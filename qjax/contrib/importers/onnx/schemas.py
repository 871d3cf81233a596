"""Checks nodes by ONNX's own schemas: ONNX Runtime refuses a file that breaks one, so its codes would mean nothing."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from qjax.export.read_errors import ReadError


def check_nodes(
    nodes: Sequence[Any], types: Mapping[str, str], outputs: Mapping[str, str], opset: int, ir_version: int
) -> None:
    """Refuse ONNX operators whose attributes, numbers of inputs or types are not allowed in this opset.

    Operators without a schema, such as those of ONNX Runtime's own domain, are checked by their handlers.

    Args:
      nodes: in order, functions inlined. types: of the inputs and initializers, by name, as ONNX writes them.
      outputs: the same of the model's outputs.

    Raises:
      ReadError: the first operator that is refused, and what its schema allows.
    """
    defs: Any = importlib.import_module("onnx.defs")
    known, newest = dict(types), (defs.onnx_opset_version(), importlib.import_module("onnx").IR_VERSION)
    if opset > newest[0] or ir_version > newest[1]:
        raise ReadError(
            f"expected an opset of at most {newest[0]} and an IR version of at most {newest[1]}, which the installed "
            f"package onnx knows, got {opset} and {ir_version}. Upgrade onnx, or export the model for an older opset."
        )
    for node in nodes:
        if node.domain or not defs.has(node.op):
            continue
        try:
            schema = defs.get_schema(node.op, opset, "")
        except defs.SchemaError:
            raise ReadError(
                f"{node.title}: ONNX has no such operator in the opset {opset}, which the model imports."
            ) from None
        _check_attributes(node, schema)
        _check_counts(node, schema)
        known |= _check_types(node, schema, known)
    for name, kind in outputs.items():
        if known.get(name, kind) != kind:
            raise ReadError(f"the output {name[:80]!r} is declared as {kind}, but its operator returns {known[name]}.")


def _check_attributes(node: Any, schema: Any) -> None:
    for name, kind in node.kinds.items():
        if name not in schema.attributes:
            listed = ", ".join(sorted(schema.attributes)) or "none"
            raise ReadError(f"{node.title}: ONNX has no attribute {name!r} here. The operator's attributes: {listed}.")
        wanted = schema.attributes[name].type
        if kind not in (0, wanted.value):
            raise ReadError(f"{node.title}: expected the attribute {name!r} to be of the kind {wanted.name}.")
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in node.kinds:
            raise ReadError(f"{node.title}: the attribute {name!r} is missing, which ONNX requires here.")


def _check_counts(node: Any, schema: Any) -> None:
    for what, names, least, most in (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            raise ReadError(f"{node.title}: expected {least} to {most} {what}, got {len(names)}.")
    for formal, name in zip(schema.inputs, node.inputs, strict=False):
        if not name and formal.option.name == "Single":
            raise ReadError(f"{node.title}: its input {formal.name!r} is missing, which ONNX requires here.")


def _check_types(node: Any, schema: Any, known: Mapping[str, str]) -> dict[str, str]:
    """The types of the outputs, derived from those of the inputs."""
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, str] = {}
    last = len(schema.inputs) - 1
    for index, name in enumerate(node.inputs):
        kind = known.get(name)
        if not name or kind is None:
            continue
        formal = schema.inputs[min(index, last)]
        wanted = allowed.get(formal.type_str, {formal.type_str})
        if kind not in wanted:
            raise ReadError(
                f"{node.title}: its input {name[:80]!r} is of {kind}, but ONNX takes {', '.join(sorted(wanted))} here."
            )
        if formal.option.name == "Variadic" and not formal.is_homogeneous:
            continue
        if bound.setdefault(formal.type_str, kind) != kind:
            raise ReadError(
                f"{node.title}: its input {name[:80]!r} is of {kind}, and another one of {bound[formal.type_str]}, and "
                "ONNX wants one type for both."
            )
    found: dict[str, str] = {}
    for formal, name in zip(schema.outputs, node.outputs, strict=False):
        kind = bound.get(formal.type_str) if formal.type_str in allowed else formal.type_str
        if name and kind is not None:
            found[name] = kind
    return found


__all__ = ["check_nodes"]
