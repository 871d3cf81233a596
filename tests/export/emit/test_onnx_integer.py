"""Every operation, rule and formula as integer ONNX: the bits of the interpreter, in two runtimes, and back."""

import numpy as np
import onnx
import pytest

from qjax.contrib.importers.onnx import written_by_qjax
from qjax.export.emit.onnx import to_model
from qjax.export.emit.onnx.integer import STYLE
from qjax.run.interpreter import Interpreter
from tests.export.emit.nodes import Named, of_kinds, of_operations, of_targets
from tests.export.emit.onnx_runs import by_onnxruntime, by_reference, checked, differing, element_types
from tests.export.graphs import differences

INTEGERS = {
    getattr(onnx.TensorProto, name)
    for name in ("BOOL", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64")
}
SMALL = 3000
"""Inputs of at most this many codes also go through the reference evaluator, which is slow."""


def disagreements(named: Named) -> dict[str, str]:
    """What is wrong, by graph."""
    found: dict[str, str] = {}
    for name, (graph, inputs) in named.items():
        want = [np.asarray(value) for value in Interpreter(graph)(*inputs)]
        feeds = dict(zip(graph.inputs, inputs, strict=True))
        model = checked(to_model(graph, style=STYLE))
        counts = {level: differing(got, want) for level, got in by_onnxruntime(model, feeds)}
        if sum(codes.size for codes in inputs) <= SMALL:
            counts["reference"] = differing(by_reference(model, feeds), want)
        again = written_by_qjax.read(onnx.load_model_from_string(model.SerializeToString()))
        known = differences(again, graph)
        floats = element_types(model) - INTEGERS
        if any(counts.values()) or known or floats:
            found[name] = f"{counts} {known} {floats}"
    return found


def test_every_operation():
    assert disagreements(of_kinds()) == {}


@pytest.mark.exhaustive
def test_every_window_and_product():
    assert disagreements({name: each for name, each in of_operations().items() if name not in of_kinds()}) == {}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_rule_and_formula_of_every_target():
    graphs = of_targets()
    assert len(graphs) > 50
    assert disagreements(graphs) == {}
