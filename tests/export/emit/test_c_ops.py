"""Every operation, rule and formula as C equals the interpreter; one file for all of them."""

import numpy as np
import pytest

from qjax import ops, targets
from tests.export.emit import c_build, nodes

EVERY = pytest.param(True, id="every", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[pytest.param(False, id="kinds"), EVERY])
def operations(request, tmp_path_factory):
    named = nodes.of_operations() if request.param else nodes.of_kinds()
    return c_build.Compiled(named, tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module", params=[pytest.param(False, id="arithmetics"), EVERY])
def rules(request, tmp_path_factory):
    named = nodes.of_targets() if request.param else nodes.of_arithmetics()
    return c_build.Compiled(named, tmp_path_factory.mktemp("rules"))


def test_every_operation_is_here(operations):
    known = {node.op for graph in operations.graphs.values() for node in graph.nodes}
    without = {name for name in ops.names() if type(ops.get(name)).kernel is ops.Op.kernel}
    # a vendor's kernel is composed of the others; those of floats have no integers; four: test_lstm, test_svdf
    recurrent = {"lstm_cell", "lstm_hidden", "svdf_feature", "svdf_time"}
    assert known == set(ops.names()) - without - {"backend", "dynamic_conv", "dynamic_dot", "island"} - recurrent


@pytest.mark.exhaustive
def test_every_operation(operations):
    operations.assert_equal(operations.called("-O2", *c_build.FASTEST[1:]))


@pytest.mark.exhaustive
def test_every_operation_under_sanitizers(operations):
    operations.assert_equal(operations.run(*c_build.SANITIZERS))


def test_every_rule_and_formula_is_here(rules):
    found = [graph.nodes[0] for graph in rules.graphs.values()]
    formulas = {node.attributes.get("formula") for node in found}
    for name in targets.names():
        target = targets.get(name)
        for op in ("add", "multiply", "rescale", "mean", "average_pool"):
            named = target.formula(op)
            # a target of powers of two has no constants for the scales of these cases
            assert named in formulas or name == "fpga", (name, op)


def test_every_rule_and_formula(rules):
    rules.assert_equal(rules.run(*c_build.SANITIZERS))


def test_no_float_and_nothing_but_stdint(operations):
    words = set(operations.text.replace("(", " ").replace(";", " ").split())
    assert not words & {"float", "double", "malloc", "free", "goto"}
    assert [line for line in operations.text.split("\n") if line.startswith("#include")] == ["#include <stdint.h>"]


def bytes_of_weights(graph) -> int:
    (program,) = c_build.programs({"m": graph})[0].values()
    return program.source.weight_bytes


def test_weights_take_the_bits_that_their_codes_need(operations):
    """Rows of 37 codes for 6 features: in 8, 4 and 2 bits; each row begins at a whole byte."""
    known = {name: bytes_of_weights(operations.graphs[name]) for name in ("dense0", "dense5", "dense6")}
    assert known == {"dense0": 6 * 37, "dense5": 6 * 19, "dense6": 6 * 10}
    # a table of 10 x 4 codes
    assert bytes_of_weights(operations.graphs["embed_bytes"]) == 20
    for name, bits in (("dense5", 4), ("dense6", 2)):
        (role,) = (graph.nodes[0].constants["kernel"] for graph in (operations.graphs[name],))
        codes = np.asarray(operations.graphs[name].tensors[role].value)
        assert (codes.min(), codes.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
