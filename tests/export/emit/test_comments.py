"""What emitted files say about rules and formulas: lines of the emitters, whatever the docstrings of the kernels."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import qjax
from qjax.export.emit import c, comments, onnx, stablehlo
from qjax.numerics.rules import get_rule
from qjax.ops import formulas

# in a process of its own, because other tests register rules and formulas
NAMES = """
from qjax.numerics.rules import registry
from qjax.ops import formulas
print(*{*registry.rule_names(), *registry._FAMILIES}, "/", *formulas.names())
"""


def test_every_rule_and_formula_of_qjax_has_a_line():
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    rules, known = (part.split() for part in done.stdout.split("/"))
    assert sorted(comments.RULES) == sorted(rules)
    assert sorted(comments.FORMULAS) == known


def test_a_rule_with_parameters_and_a_formula_named_after_a_rule():
    assert comments.of_rule("power_of_two:TRN:WRAP").startswith("The rule power_of_two:TRN:WRAP: one shift")
    assert comments.of_formula("ruy/f32").startswith("The formula ruy/f32: the high word rounded down")
    assert comments.of_rule("my_own") == "The rule my_own."


@pytest.fixture(scope="module")
def graph():
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    model = qjax.from_function(lambda w, x: jax.nn.softmax(x @ w + (x @ w)[:, ::-1]), x.T)
    qmodel = qjax.quantize(model, qjax.Recipe(target="tflite_optimized_x86"), x)
    return qjax.convert(qmodel, x).ir


def test_docstrings_of_kernels_change_no_emitted_file(graph, monkeypatch):
    def files():
        model = onnx.to_model(graph, style="integer", batch=4).SerializeToString(deterministic=True)
        return c.to_files(graph, vectors=0), model, stablehlo.to_bytes(graph, platforms=["cpu"])

    before = files()
    used = [get_rule(node.attributes["rule"]).apply for node in graph.nodes if "rule" in node.attributes]
    used += [
        sys.modules[formulas.get(node.attributes["formula"]).kernel.__module__]
        for node in graph.nodes
        if "formula" in node.attributes
    ]
    assert used
    for documented in used:
        monkeypatch.setattr(documented, "__doc__", "Another wording.")
    assert files() == before


def test_stablehlo_holds_no_line_of_a_source_file(graph):
    text = jax.export.deserialize(bytearray(stablehlo.to_bytes(graph, platforms=["cpu"]))).mlir_module()
    assert "callsite" not in text
