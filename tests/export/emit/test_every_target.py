"""Every operation under every target becomes C, integer ONNX and StableHLO, with the interpreter's codes.

The graphs of `nodes.of_operations` are put under each target; what two targets make alike is one graph here. The
counts say what is covered, so nothing falls out unseen.
"""

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax import export

from qjax import ops, targets
from qjax.assign import assign
from qjax.assign.retarget import stated
from qjax.contrib.importers.onnx.written_by_qjax import read
from qjax.export.emit import stablehlo
from qjax.export.emit.onnx import to_model
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.unsupported import ConversionError
from tests.export.emit import c_build, nodes
from tests.export.emit.onnx_runs import by_onnxruntime, differing
from tests.export.graphs import assert_equal

GRAPHS = 164
"""Those of `nodes.of_operations`, the bare sums, and softmax on a runtime's own grid."""
TARGETS = targets.names()
"""Those of qjax: a tutorial that ran in this process may have registered its own."""
DISTINCT = 1112
"""Of GRAPHS x targets, those that differ from each other."""
REFUSED = 366
"""Of GRAPHS x targets, those with codes of 16 bits that the target's runtime does not have."""
FACTS = 140
"""Operations, targets, rules, formulas, methods and roundings, and that a graph has none of these."""
ARITHMETICS = 170
"""Of these, one for each operation and rule, formula or method."""
SUMS = ("add", "multiply", "rescale", "sum", "window_sum", "dot")
OF_TARGETS = (
    "dense0",
    "dense1",
    "conv1_6_6",
    "prod",
    "multiply",
    "squared_difference",
    "softmax",
    "softmax_unit_2_3_37",
    "softmax_unit_3_11",
)
"""Graphs which, with the bare sums, show every rule, formula and method."""
ARITHMETIC = ("rule", "formula", "method", "rounding")
FLOATS = re.compile(r"x(f16|f32|f64|bf16)>|tensor<(f16|f32|f64|bf16)>")


def scaled(graph: Graph) -> Graph:
    """The weights with a scale, from which a target makes its constants."""
    (node,) = graph.nodes
    if "kernel" not in node.constants or node.op == "embed":
        return graph
    kernel = graph.tensors[node.constants["kernel"]]
    info = np.iinfo(kernel.dtype)
    scale, zero_point = np.asarray(2.0**-9, np.float32), np.asarray(0, np.int32)
    held = dataclasses.replace(kernel, quantization=Quantization(scale, zero_point, int(info.min), int(info.max)))
    return graph.replace(tensors={**graph.tensors, kernel.name: held})


def bare(graph: Graph) -> Graph | None:
    """A sum of scaled integers without constants: for its target to choose the formula. None for other operations."""
    (node,) = graph.nodes
    if node.op not in SUMS or "kernel" in node.constants:
        return None
    known = {key: value for key, value in node.attributes.items() if key not in ("rounding", "formula")}
    tensors, constants = dict(graph.tensors), {}
    if node.op in ("sum", "window_sum"):
        taken = known.get("window") or [graph.tensors["x0"].shape[axis] for axis in known["axes"]]
        tensors["count"] = Tensor("count", (), "int32", None, np.asarray(np.prod(taken), np.int32))
        constants["count"] = "count"
    made = dataclasses.replace(node, attributes=known, constants=constants)
    return graph.replace(nodes=(made,), tensors=tensors, target="")


def unit_softmax() -> Iterator[tuple[str, tuple[Graph, list[np.ndarray]]]]:
    """On the grid where runtimes have methods of their own: rows of one code, one row, rows of 16, 16 and 5."""
    rng = np.random.default_rng(0)
    known = nodes.INT8.quantization()
    unit = Quantization(np.asarray(2.0**-8, np.float32), np.asarray(-128, np.int32), -128, 127)
    wide = Quantization(np.asarray(2.0**-16, np.float32), np.asarray(-(2**15), np.int32), -(2**15), 2**15 - 1)
    kinds = (((5, 1), "int8", unit), ((1, 9), "int8", unit), ((2, 3, 37), "int8", unit), ((3, 11), "int16", wide))
    for shape, dtype, y in kinds:
        codes = nodes.INT8.codes(rng, shape)
        # the sum of equal greatest codes is the greatest
        codes[..., : shape[-1] // 2] = 127
        tensors = {"x": Tensor("x", shape, "int8", known), "y": Tensor("y", shape, dtype, y)}
        node = Node("node", "softmax", ("x",), "y", {}, {"axes": [len(shape) - 1]})
        graph = Graph(tensors, (node,), ("x",), ("y",), "")
        yield f"softmax_unit_{'_'.join(map(str, shape))}", (graph, [codes])


def has_no_such_codes(graph: Graph, target: targets.Target) -> bool:
    """Whether it holds codes that the target's runtime has not. The int16 ones have no zero point."""
    codes = {tensor.dtype for tensor in graph.tensors.values() if tensor.quantization is not None}
    computed = {
        tensor.dtype for tensor in graph.tensors.values() if tensor.quantization is not None and tensor.value is None
    }
    wide = not target.wide_activations and bool(computed & {"int16", "uint16"})
    return wide or (not target.wide_zero_points and "uint16" in codes)


def key_of(graph: Graph) -> tuple[object, ...]:
    """What a graph of one node computes."""
    (node,) = graph.nodes
    held = ((role, np.asarray(graph.constant(node, role))) for role in sorted(node.constants))
    shapes = [(t.shape, t.dtype) for t in (graph.tensors[name] for name in (*node.inputs, node.output))]
    arrays = [(role, x.dtype.name, x.shape, x.tobytes()) for role, x in held]
    return node.op, repr(sorted(node.attributes.items())), str(shapes), *arrays


class Everything:
    """All graphs under all targets, or in a short form only those under all of them whose arithmetic is a target's."""

    def __init__(self, *, short: bool = False) -> None:
        given: nodes.Named = {}
        for name, (graph, inputs) in nodes.of_operations().items():
            given[name] = scaled(graph), inputs
            without = bare(graph)
            if without is not None:
                given[f"{name}_bare"] = without, inputs
        given |= dict(unit_softmax())
        self.graphs = len(given)
        self.covered: collections.Counter[tuple[str, str]] = collections.Counter()
        self.named: nodes.Named = {}
        self.refused = 0
        seen: set[tuple[object, ...]] = set()
        for number, (name, (graph, inputs)) in enumerate(given.items()):
            every = not short or name.endswith("_bare") or name in OF_TARGETS
            for target in TARGETS if every else [TARGETS[number % len(TARGETS)]]:
                if has_no_such_codes(graph, targets.get(target)):
                    with pytest.raises(ConversionError, match=r"zero point 0|at most 8 bits"):
                        assign(stated(graph), targets.get(target))
                    self.refused += 1
                    continue
                # as it is, a graph made by hand may have a rounding that no target has
                made = graph if graph.target == target else assign(stated(graph), targets.get(target))
                self.covered[made.nodes[0].op, target] += 1
                key = key_of(made)
                if key not in seen:
                    seen.add(key)
                    self.named[f"{name}_{target}"] = made, inputs


@pytest.fixture(scope="module")
def everything() -> Everything:
    return Everything()


@functools.cache
def diagonal() -> nodes.Named:
    """Few graphs that have every operation, every target and every rule, formula and method of one."""
    named = Everything(short=True).named
    facts = {name: set(facts_of(graph)) for name, (graph, _) in named.items()}
    found: nodes.Named = {}
    left = set[object]().union(*facts.values())
    while left:
        name = max(facts, key=lambda name: len(facts[name] & left))
        found[name] = named[name]
        left -= facts[name]
    return found


def facts_of(graph: Graph) -> Iterator[tuple[Any, Any]]:
    (node,) = graph.nodes
    yield node.op, "kernel" in node.constants
    yield "target", graph.target
    for key in ARITHMETIC:
        yield key, node.attributes.get(key)


def chosen(named: nodes.Named) -> nodes.Named:
    """The first graph of each operation and arithmetic."""
    found: dict[str, str] = {}
    for name, (graph, _) in named.items():
        (node,) = graph.nodes
        known = {key: node.attributes.get(key) for key in ARITHMETIC}
        found.setdefault(f"{node.op} {'kernel' in node.constants} {known}", name)
    return {name: named[name] for name in found.values()}


def merged(named: nodes.Named) -> tuple[Graph, list[np.ndarray]]:
    """All of them as one graph, which is traced once."""
    tensors: dict[str, Tensor] = {}
    made: list[Node] = []
    for name, (graph, _) in named.items():
        (node,) = graph.nodes
        of = {old: f"{name}/{old}" for old in graph.tensors}
        tensors |= {of[old]: dataclasses.replace(t, name=of[old]) for old, t in graph.tensors.items()}
        constants = {role: of[old] for role, old in node.constants.items()}
        inputs = tuple(of[old] for old in node.inputs)
        made.append(dataclasses.replace(node, name=name, inputs=inputs, output=of[node.output], constants=constants))
    inputs = tuple(name for node in made for name in node.inputs if tensors[name].value is None)
    outputs = tuple(node.output for node in made)
    feeds = [codes for _, codes in named.values()]
    whole = Graph(tensors, tuple(made), inputs, outputs, "nearest_even")
    return check_integer(whole), [codes for each in feeds for codes in each]


def onnx_disagreements(named: nodes.Named, expected: dict[str, list[np.ndarray]]) -> dict[str, int]:
    graph, inputs = merged(named)
    feeds = dict(zip(graph.inputs, inputs, strict=True))
    wanted = [y for name in named for y in expected[name]]
    wrong: dict[str, int] = {}
    for level, found in by_onnxruntime(to_model(graph, style="integer", batch=1), feeds):
        for name, got, want in zip(named, found, wanted, strict=True):
            if differing([got], [want]):
                wrong[f"{name} {level}"] = differing([got], [want])
    return wrong


@pytest.mark.exhaustive
def test_every_operation_target_and_arithmetic_is_here():
    """In the short form; test-all counts the pairs of them."""
    facts = {fact for graph, _ in diagonal().values() for fact in facts_of(graph)}
    assert {target for kind, target in facts if kind == "target"} == set(TARGETS)
    assert {op for op, weighted in facts if isinstance(weighted, bool)} == operations()
    known = {key: {each for kind, each in facts if kind == key} for key in ARITHMETIC}
    for target in map(targets.get, TARGETS):
        assert not target.softmax or target.softmax in known["method"]
        # graphs made by hand stay as they are under the target that they are for
        assert getattr(target.requantize, "rule", None) in known["rule"] or target.name == "nearest_even"
    assert len(facts) == FACTS, len(facts)


def operations() -> set[str]:
    """Those that stand in the graphs of this file."""
    without = {name for name in ops.names() if type(ops.get(name)).kernel is ops.Op.kernel}
    # a vendor's kernel is composed of the others; two hold floats, see test_float_islands; four: test_lstm, test_svdf
    recurrent = {"lstm_cell", "lstm_hidden", "svdf_feature", "svdf_time"}
    return set(ops.names()) - without - {"backend", "dynamic_conv", "dynamic_dot", "island"} - recurrent


@pytest.mark.exhaustive
def test_all_operations_under_all_targets_are_here(everything):
    known = operations()
    # their graphs have codes of 16 bits; `test_c_ops` has others for each formula
    wide = {"add", "multiply", "rescale"}
    narrow = {target for target in TARGETS if not targets.get(target).wide_activations}
    pairs = {(op, target) for op in known for target in TARGETS if not (op in wide and target in narrow)}
    assert set(everything.covered) == pairs
    assert everything.graphs == GRAPHS
    assert everything.covered.total() + everything.refused == GRAPHS * len(TARGETS)
    assert everything.refused == REFUSED, everything.refused
    assert len(everything.named) == DISTINCT, len(everything.named)
    assert len(chosen(everything.named)) == ARITHMETICS


def check(named: nodes.Named, folder: pathlib.Path) -> None:
    compiled = c_build.Compiled(named, folder)
    compiled.assert_equal(compiled.called("-O0"))
    assert onnx_disagreements(named, compiled.expected) == {}


def become_c(named: nodes.Named) -> None:
    programs, _ = c_build.programs({name: graph for name, (graph, _) in named.items()})
    assert len(programs) == len(named)


def become_onnx(named: nodes.Named) -> None:
    assert len(to_model(merged(named)[0], style="integer", batch=1).graph.node) >= len(named)


def test_operations_and_arithmetics_become_c():
    """Those that `test_c_ops` does not compile and run."""
    ran = {
        fact for named in (nodes.of_kinds(), nodes.of_arithmetics()) for g, _ in named.values() for fact in facts_of(g)
    }
    left = {name: set(facts_of(graph)) - ran for name, (graph, _) in diagonal().items()}
    chosen = {name for name, facts in left.items() if any(kind != "target" for kind, _ in facts)}
    assert len(chosen) > 5
    become_c({name: diagonal()[name] for name in chosen})


def test_operations_and_arithmetics_become_onnx():
    become_onnx(diagonal())


@pytest.mark.exhaustive
def test_every_arithmetic_becomes_c_and_onnx(everything):
    named = chosen(everything.named)
    assert len(named) == ARITHMETICS
    become_c(named)
    become_onnx(named)


@pytest.mark.exhaustive
def test_every_arithmetic_comes_back_from_onnx(everything):
    graph, _ = merged(chosen(everything.named))
    assert_equal(read(to_model(graph, style="integer", batch=1)), graph)


@pytest.mark.exhaustive
def test_c_and_onnx_of_softmax(everything, tmp_path):
    """Run here; `test_c_ops` and `test_onnx_integer` run every operation, rule and formula."""
    named = {name: each for name, each in everything.named.items() if name.startswith("softmax_unit")}
    methods = {graph.nodes[0].attributes["method"] for graph, _ in named.values()}
    own = {target.softmax for target in map(targets.get, TARGETS) if target.softmax}
    assert methods == {"exact", "gemmlowp_int16", *own}
    check(named, tmp_path)


def assert_no_float_in_stablehlo(named: nodes.Named) -> None:
    """Lowering only: what it computes is the interpreter's own program."""
    exported = export.deserialize(bytearray(stablehlo.to_bytes(merged(named)[0], batch=1)))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert not FLOATS.search(exported.mlir_module())


@pytest.mark.exhaustive
def test_stablehlo_of_operations_and_arithmetics_holds_no_float():
    assert_no_float_in_stablehlo(diagonal())


@pytest.mark.exhaustive
def test_stablehlo_of_every_arithmetic_holds_no_float(everything):
    assert_no_float_in_stablehlo(chosen(everything.named))


@pytest.mark.exhaustive
def test_c_and_onnx_of_every_graph(everything, tmp_path):
    check(everything.named, tmp_path)
