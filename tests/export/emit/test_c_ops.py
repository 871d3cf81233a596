"""Every operation, rule and formula as C equals the interpreter; one compilation for all of them."""

import ctypes

import jax
import numpy as np
import pytest

from qjax import ops, targets
from qjax.export.interpreter import Interpreter
from tests.export.emit import c_build, c_nodes


class Compiled:
    """Many graphs in one C file, what they are fed, and what the interpreter makes of it."""

    def __init__(self, nodes: c_nodes.Named, folder) -> None:
        self.inputs = {name: inputs for name, (_, inputs) in nodes.items()}
        self.graphs = {name: graph for name, (graph, _) in nodes.items()}
        self.programs, self.text = c_build.programs(self.graphs)
        self.folder = folder
        self._expected: dict[str, list[np.ndarray]] = {}

    def expected(self, name: str) -> list[np.ndarray]:
        if name not in self._expected:
            self._expected[name] = self._interpreted(name)
        return self._expected[name]

    def _interpreted(self, name: str) -> list[np.ndarray]:
        interpreter = Interpreter(self.graphs[name])
        # integers are the same at every level, and most of the time here would be XLA's
        fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        run = jax.jit(interpreter.outputs, compiler_options=fast)
        return [np.asarray(y) for y in run(interpreter.constants, list(self.inputs[name]))]

    def assert_equal(self, found: dict[str, list[np.ndarray]]) -> None:
        wrong: list[str] = []
        for name in self.graphs:
            for got, want in zip(found[name], self.expected(name), strict=True):
                assert got.dtype == want.dtype
                if not np.array_equal(got, want):
                    wrong.append(f"{name}: {np.count_nonzero(got != want)} of {want.size}")
        assert not wrong, wrong


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    return Compiled(c_nodes.of_operations(), tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    return Compiled(c_nodes.of_targets(), tmp_path_factory.mktemp("rules"))


def called(compiled: Compiled, *flags: str) -> dict[str, list[np.ndarray]]:
    library = ctypes.CDLL(str(c_build.compiled(compiled.text, compiled.folder, *flags)))
    return {
        name: c_build.call(library, program, name, compiled.inputs[name]) for name, program in compiled.programs.items()
    }


def test_every_operation_is_here(operations):
    known = {node.op for graph in operations.graphs.values() for node in graph.nodes}
    without = {name for name in ops.names() if type(ops.get(name)).kernel is ops.Op.kernel}
    # a vendor's kernel is composed of the others
    assert known == set(ops.names()) - without - {"backend"}


def test_every_operation(operations):
    operations.assert_equal(called(operations, "-O3"))


def test_every_operation_under_sanitizers(operations):
    found = c_build.run_program(
        operations.programs, operations.text, operations.folder, operations.inputs, c_build.SANITIZERS
    )
    operations.assert_equal(found)


def test_every_rule_and_formula_is_here(rules):
    nodes = [graph.nodes[0] for graph in rules.graphs.values()]
    formulas = {node.attributes.get("formula") for node in nodes}
    for name in targets.names():
        target = targets.get(name)
        for op in ("add", "multiply", "rescale", "mean", "average_pool"):
            named = target.formula(op)
            # a target of powers of two has no constants for the scales of these cases
            assert named in formulas or name == "fpga", (name, op)


@pytest.mark.slow
def test_every_rule_and_formula(rules):
    rules.assert_equal(called(rules, "-O1"))


def test_no_float_and_nothing_but_stdint(operations):
    words = set(operations.text.replace("(", " ").replace(";", " ").split())
    assert not words & {"float", "double", "malloc", "free", "goto"}
    assert [line for line in operations.text.split("\n") if line.startswith("#include")] == ["#include <stdint.h>"]
