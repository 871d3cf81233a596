"""`qjax.export.match`: every embedding by brute force on small random graphs; the rules about overlaps; predicates."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax import targets
from qjax.assign import assign
from qjax.export import Pattern, any_of, constant, match, op, optional, tensor
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Tensor
from tests.export.graphs import quantization
from tests.lower.lowered import residual_network

# ---------------------------------------------------------------------------- random graphs and patterns


@st.composite
def graphs(draw: Any) -> Graph:
    """Up to six nodes of one or two inputs; a tensor may be read twice, by one node too."""
    tensors = ["x", "z"]
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["add", "add", "sub", "clamp", "reshape"]))
        name = f"n{index}"
        inputs = tuple(draw(st.sampled_from(tensors)) for _ in range(2 if kind in ("add", "sub") else 1))
        attributes = {"subtract": kind == "sub"} if kind in ("add", "sub") else {}
        nodes.append(Node(name, "add" if kind == "sub" else kind, inputs, f"t{index}", {}, attributes))
        tensors.append(f"t{index}")
    outputs = {nodes[-1].output} | draw(st.sets(st.sampled_from(tensors[2:]), max_size=2))
    known = {name: Tensor(name, (4,), "int8", quantization()) for name in tensors}
    return Graph(known, tuple(nodes), ("x", "z"), tuple(sorted(outputs)), "nearest_even")


@st.composite
def patterns(draw: Any, depth: int = 3) -> Pattern:
    """An op; below it ops, alternatives and tensors, some of which share a name."""
    shared = op("reshape", tensor("deep"), name="shared")

    def part(depth: int) -> Pattern:
        kind = draw(st.sampled_from(["tensor", "p", "shared", "op", "op", "any_of"])) if depth else "tensor"
        if kind == "tensor":
            return tensor()
        if kind == "p":
            return tensor("p")
        if kind == "shared":
            return shared
        if kind == "any_of":
            return any_of(part(depth - 1), part(depth - 1))
        return node(depth)

    def node(depth: int) -> Pattern:
        name = draw(st.sampled_from(["add", "add", "clamp", "reshape", "*"]))
        if name == "*" or draw(st.integers(0, 5)) == 0:
            return op(name)
        if name == "add":
            return op(name, part(depth - 1), part(depth - 1))
        return op(name, part(depth - 1))

    return node(depth)


# ---------------------------------------------------------------------------- the oracle


def plain(pattern: Pattern) -> Iterator[Pattern]:
    """The patterns without alternatives that a pattern stands for."""
    if pattern.kind == "any_of":
        for alternative in pattern.inputs or ():
            yield from plain(alternative)
    elif pattern.inputs is None:
        yield pattern
    else:
        for inputs in itertools.product(*(list(plain(p)) for p in pattern.inputs)):
            yield Pattern("op", pattern.ops, inputs, pattern.name)


def positions(pattern: Pattern) -> list[Pattern]:
    """The places for nodes, a named one once, from the output on."""
    found: list[Pattern] = []

    def visit(p: Pattern) -> None:
        if p.kind == "op" and not (p.name and any(q.name == p.name for q in found)):
            found.append(p)
            for child in p.inputs or ():
                visit(child)

    visit(pattern)
    return found


def embeddings(graph: Graph, pattern: Pattern) -> set[Any]:
    """Every assignment of nodes to places that is a match, tried one by one."""
    found: set[Any] = set()
    for one in plain(pattern):
        count = len(positions(one))
        for chosen in itertools.permutations(graph.nodes, count):
            for swaps in itertools.product((False, True), repeat=count):
                key = embedding(graph, one, list(chosen), swaps)
                if key is not None:
                    found.add(key)
    return found


def embedding(graph: Graph, pattern: Pattern, chosen: list[Node], swaps: tuple[bool, ...]) -> Any:
    """What a match would report, or None if the nodes are none."""
    order: list[Node] = []
    named: dict[str, Node] = {}
    bound: dict[str, str] = {}
    outside: list[str] = []
    labels: list[tuple[str | None, str]] = []

    def visit(p: Pattern, name: str) -> bool:
        if p.kind == "tensor":
            if p.name in bound:
                return bound[p.name] == name
            if p.name is not None:
                bound[p.name] = name
            outside.append(name)
            return True
        if p.name in named:
            return named[p.name].output == name
        node, swapped = chosen[len(order)], swaps[len(order)]
        order.append(node)
        labels.append((p.name, node.name))
        if p.name is not None:
            named[p.name] = node
        if node.output != name or (p.ops and node.op not in p.ops):
            return False
        if p.inputs is None:
            outside.extend(node.inputs)
            return not swapped
        if swapped and (node.op != "add" or node.attributes["subtract"]):
            return False
        inputs = node.inputs[::-1] if swapped else node.inputs
        return len(inputs) == len(p.inputs) and all(visit(q, t) for q, t in zip(p.inputs, inputs, strict=True))

    if not visit(pattern, chosen[0].output) or len(order) != len(chosen):
        return None
    hidden = {node.output for node in chosen[1:]}
    read_outside = {t for node in graph.nodes if node not in chosen for t in node.inputs} | set(graph.outputs)
    if hidden & read_outside or {node.output for node in chosen} & set(outside):
        return None
    return tuple(labels), tuple(outside)


def key_of(found: Any, pattern: Pattern) -> Any:
    """The same from a match: names of nodes without the labels that matching invents."""
    names = {part.name for part in pattern.walk()}
    named = {(label if label in names else None, view.name) for label, view in found.nodes.items()}
    return frozenset(named), tuple(t.name for t in found.inputs)


@given(graphs(), patterns())
@settings(max_examples=100)
def test_all_embeddings_are_found_and_no_others(graph: Graph, pattern: Pattern) -> None:
    if max(len(positions(one)) for one in plain(pattern)) > 4:
        return
    expected = {(frozenset(labels), inputs) for labels, inputs in embeddings(graph, pattern)}
    assert {key_of(m, pattern) for m in match(graph, pattern, overlapping=True)} == expected
    # without overlaps: from the last node to the first, each the output of a match if any embedding is left
    chosen, claimed = match(graph, pattern), set[str]()
    by_root = {m.root.name: m for m in chosen}
    for node in reversed(graph.nodes):
        left = [e for e in expected if root_of(e, graph) == node.name and not claimed & {n for _, n in e[0]}]
        assert (node.name in by_root) == bool(left)
        if left:
            assert key_of(by_root[node.name], pattern) in left
            claimed |= {view.name for view in by_root[node.name].nodes.values()}
    order = [node.name for node in graph.nodes]
    assert [order.index(m.root.name) for m in chosen] == sorted(order.index(m.root.name) for m in chosen)


def root_of(expected: Any, graph: Graph) -> str:
    names = {name for _, name in expected[0]}
    return [node.name for node in graph.nodes if node.name in names][-1]


# ---------------------------------------------------------------------------- by hand


def small(*nodes: Node, outputs: tuple[str, ...] = ()) -> Graph:
    names = {"x", "z"} | {name for node in nodes for name in (*node.inputs, node.output)}
    tensors = {name: Tensor(name, (4,), "int8", quantization()) for name in names}
    return Graph(tensors, nodes, ("x", "z"), outputs or (nodes[-1].output,), "nearest_even")


def add(name: str, *inputs: str, subtract: bool = False) -> Node:
    return Node(name, "add", inputs, name, {}, {"subtract": subtract})


@pytest.fixture(scope="module")
def network() -> IntegerGraph:
    return IntegerGraph(assign(residual_network(), targets.get("nearest_even")))


def test_a_relu_is_found_on_its_producer(network: IntegerGraph) -> None:
    (found,) = match(network, op("conv", tensor("x"), name="c", relu=True))
    assert found["c"].name == "h"
    assert found["c"].attributes["strides"] == [1, 1]
    assert [t.name for t in found.inputs] == ["x"]
    assert found.output.name == "h"
    assert set(found.constants) >= {"c/kernel", "c/bias", "c/multiplier", "c/clamp_min"}
    assert np.array_equal(np.asarray(found["c"].constants["kernel"]), np.asarray(found.constants["c/kernel"].value))
    assert match(network, op("conv", relu=False)) == []
    # a clip has a bound above as well, and is a node of its own here
    assert match(network, op("clamp", relu=True)) == []
    (clip,) = match(network, op("clamp"))
    assert set(clip.constants) == {"clamp/clamp_min", "clamp/clamp_max"}


def test_a_residual_reads_its_tensor_twice(network: IntegerGraph) -> None:
    x = tensor("x")
    (found,) = match(network, op("add", op("conv", x, name="conv"), x, name="add"))
    assert [t.name for t in found.inputs] == ["x"]
    assert [view.name for view in found.nodes.values()] == ["h", "r"]
    # the addition has the convolution second: commutative is what finds it
    assert match(network, op("add", op("conv", x), x, commutative=False)) == []
    assert match(network, op("add", op("conv", tensor("a")), tensor("b")))[0].nodes["conv"].name == "h"


def test_one_tensor_at_both_inputs() -> None:
    graph = small(add("s", "x", "x"))
    p = tensor("p")
    assert len(match(graph, op("add", p, p))) == 1
    (apart,) = match(graph, op("add", tensor("a"), tensor("b")))
    assert [t.name for t in apart.inputs] == ["x", "x"]
    assert match(small(add("s", "x", "z")), op("add", p, p)) == []


def test_a_subtraction_does_not_commute() -> None:
    graph = small(Node("r", "reshape", ("x",), "r"), add("s", "z", "r", subtract=True))
    assert match(graph, op("add", op("reshape"), tensor())) == []
    assert len(match(graph, op("add", tensor(), op("reshape")))) == 1
    assert len(match(graph, op("add", op("reshape"), tensor(), commutative=True))) == 1
    assert match(graph, op("add", attributes={"subtract": False})) == []


def test_what_is_read_elsewhere_is_not_hidden() -> None:
    chain = [Node("r", "reshape", ("x",), "r"), Node("c", "clamp", ("r",), "c")]
    pattern = op("clamp", op("reshape"))
    assert len(match(small(*chain), pattern)) == 1
    assert match(small(*chain, outputs=("c", "r")), pattern) == []
    assert match(small(*chain, add("s", "r", "c")), pattern) == []
    # a wildcard is from outside: the match's own tensors are not
    assert match(small(*chain, add("s", "r", "c")), op("add", tensor(), op("clamp", op("reshape")))) == []
    whole = op("add", op("reshape", name="r"), op("clamp", op("reshape", name="r")))
    assert len(match(small(*chain, add("s", "r", "c")), whole)) == 1


def test_optional_nodes_and_the_longest_first() -> None:
    graph = small(Node("r", "reshape", ("x",), "r"), Node("c", "clamp", ("r",), "c"), Node("d", "clamp", ("z",), "d"))
    pattern = optional(op("clamp", op("reshape", tensor("x"), name="r"), name="c"))
    (found,) = match(graph.replace(outputs=("c", "d")), pattern)
    assert ("c" in found, "r" in found, found.output.name) == (True, True, "c")
    (alone,) = match(graph.replace(outputs=("c", "d", "r")), pattern)
    assert ("c" in alone, alone.output.name) == (False, "r")
    with pytest.raises(KeyError, match=r"Nothing named 'c' in this match. Names: r, x"):
        alone["c"]


def test_earlier_patterns_claim_first() -> None:
    graph = small(
        Node("a", "reshape", ("x",), "a"), Node("b", "reshape", ("a",), "b"), Node("c", "reshape", ("b",), "c")
    )
    pair, single = op("reshape", op("reshape")), op("reshape")
    found = match(graph, pair, single)
    assert [[v.name for v in m.nodes.values()] for m in found] == [["a"], ["b", "c"]]
    assert [m.pattern for m in found] == [single, pair]
    assert list(found[1].nodes) == ["reshape", "reshape#2"]
    assert len(match(graph, pair, overlapping=True)) == 2
    assert [m.root.name for m in match(graph, single, pair)] == ["a", "b", "c"]


def test_constants_among_the_inputs() -> None:
    held = Tensor("k", (4,), "int8", quantization(), np.zeros(4, np.int8))
    graph = small(Node("s", "concatenate", ("x", "k"), "s", {}, {"axis": 0}))
    graph = graph.replace(tensors={**graph.tensors, "k": held})
    (found,) = match(graph, op("concatenate", tensor(), constant("c", where=lambda t: t.dtype == "int8")))
    assert found["c"] is held
    assert match(graph, op("concatenate", constant(), tensor())) == []


@pytest.mark.exhaustive
def test_a_long_chain_is_no_work() -> None:
    nodes = [Node(f"n{i}", "reshape", ("x" if i == 0 else f"n{i - 1}",), f"n{i}") for i in range(2000)]
    pattern = op("reshape", op("reshape", op("reshape", tensor())))
    assert len(match(small(*nodes), pattern)) == 666


def test_errors(network: IntegerGraph) -> None:
    with pytest.raises(TypeError, match=r"expected a graph from qjax.convert, got int"):
        match(3, op("conv"))
    with pytest.raises(ValueError, match="expected at least one pattern"):
        match(network)
    with pytest.raises(ValueError, match="got a bare tensor"):
        match(network, tensor("x"))
    with pytest.raises(ValueError, match=r"A relu is a bound on its producer: op\('conv', relu=True\)"):
        op("relu")
    with pytest.raises(TypeError, match="op: an input: expected a Pattern"):
        op("conv", "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="without '/' and '#'"):
        op("conv", name="a/b")
    with pytest.raises(ValueError, match="Two different patterns are called 'x'"):
        op("add", op("conv", name="x"), op("dot", name="x"))
    with pytest.raises(ValueError, match="optional: expected an op with a pattern for its one input"):
        optional(op("add", tensor(), tensor()))
    with pytest.raises(ValueError, match="any_of: expected at least one pattern"):
        any_of()
