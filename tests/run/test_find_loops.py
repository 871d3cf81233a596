"""Loops of a graph: found from its nodes, run as loops, equal to the nodes one after another."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.kernels import prepare
from qjax.jaxprs.evaluator import run_in_numpy
from qjax.run import loop_execution
from qjax.run.find_loops import Carried, Inside, Outside, over_iterations, repeats
from qjax.run.interpreter import run
from qjax.run.shared_constants import SharedConstants
from tests import in_numpy


class Recurrent(nnx.Module):
    """A recurrent layer over all steps and a classifier of the last one."""

    def __init__(self, *, every: bool = False, reverse: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs), reverse=reverse, keep_order=True)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.every = every

    def __call__(self, x):
        hidden: Any = self.rnn(x)
        return self.out(hidden if self.every else hidden[:, -1])


class Both(nnx.Module):
    """One direction and the other, side by side."""

    def __init__(self, cell: Any = nnx.LSTMCell) -> None:
        rngs = nnx.Rngs(1)
        cells = cell(3, 4, rngs=rngs), cell(3, 4, rngs=rngs)
        self.rnn = nnx.Bidirectional(nnx.RNN(cells[0]), nnx.RNN(cells[1]))

    def __call__(self, x):
        return self.rnn(x)


class Stack(nnx.Module):
    """Equal layers one after another, each with its own weights; the middle one is an output too."""

    def __init__(self, depth: int) -> None:
        rngs = nnx.Rngs(2)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(depth)])
        self.norms = nnx.List([nnx.LayerNorm(4, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(x + nnx.relu(layer(x)))
            if index == len(self.layers) // 2:
                middle = x
        return x, middle


def converted(model, shape, target="nearest_even"):
    x = jax.random.normal(jax.random.key(0), shape)
    with in_numpy.computing():
        qmodel = qjax.quantize(model, qjax.Recipe(target=target), x)
        qjax.calibrate(qmodel, [x])
        return qmodel, qjax.convert(qmodel, x), x


@functools.cache
def recurrent(steps, *, every=False):
    """The recurrent network, made once for each number of steps."""
    return converted(Recurrent(every=every), (2, steps, 3))


def assert_equal_to_unrolled(graph, x):
    """Every tensor: of the loops, and of the nodes one after another."""
    codes = graph.quantize(x)
    ir, loops = graph.ir, graph.interpreter.loops
    names = [node.output for node in ir.nodes]
    constants = graph.interpreter.constants
    # the interpreter below is compiled as always; integers are the same at every level, and in numpy
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    unrolled = run_in_numpy(lambda c, i: run(ir, c, i))(constants, [codes])
    every = jax.jit(lambda c, i: loop_execution.outputs(ir, loops, c, i, names), compiler_options=fast)
    compiled = every(constants, [codes])
    for name in names:
        assert np.array_equal(compiled[name], unrolled[name]), name
        assert compiled[name].dtype == unrolled[name].dtype
    for name, found in zip(ir.outputs, graph.interpreter(codes), strict=True):
        assert np.array_equal(found, unrolled[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "loops"),
    [
        pytest.param(Recurrent, 1, id="last"),
        pytest.param(lambda: Recurrent(every=True, reverse=True), 1, id="reversed", marks=pytest.mark.exhaustive),
        pytest.param(Both, 2, id="bidirectional", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Stack(6), 1, id="layers", marks=pytest.mark.exhaustive),
    ],
)
def test_loops_equal_the_nodes_one_after_another(make, loops):
    model = make()
    shape = (2, 4) if isinstance(model, Stack) else (2, 4, 3)
    _, graph, x = recurrent(4) if make is Recurrent else converted(model, shape)
    # a loop of one node (reads or reshapes of all steps) may stand beside that of the body
    assert sum(loop.period > 1 for loop in graph.interpreter.loops) == loops
    assert_equal_to_unrolled(graph, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["double_round", "tflite_micro", "tflite_xnnpack", "onnxruntime", "torch_fbgemm"])
@pytest.mark.parametrize(
    "make",
    [lambda: Recurrent(every=True), Both, lambda: Stack(5)],
    ids=["steps", "bidirectional", "layers"],
)
def test_loops_under_other_targets(make, target):
    model = make()
    shape = (2, 4) if isinstance(model, Stack) else (2, 4, 3)
    _, graph, x = converted(model, shape, target)
    assert graph.interpreter.loops
    assert_equal_to_unrolled(graph, x)


def test_programs_do_not_grow_with_the_steps():
    sizes = {}
    for steps in (4, 8):
        _, graph, x = recurrent(steps)
        sizes[steps] = str(graph.interpreter.jaxpr(graph.quantize(x))).count("\n")
    assert sizes[4] == sizes[8]


@pytest.mark.exhaustive
def test_exact_programs_do_not_grow_with_the_steps():
    sizes = {}
    for steps in (4, 8):
        qmodel, _, x = recurrent(steps)
        definition, state = nnx.split(qmodel)
        forward = qjax.exact(qmodel, x)
        jaxpr = jax.make_jaxpr(lambda s, x, d=definition, f=forward: f(nnx.merge(d, s), x))(state, x)
        sizes[steps] = str(jaxpr).count("\n")
    # what the graph makes of the weights is there once; the slices of the tensors that a step reads are not in it
    assert sizes[8] < 1.1 * sizes[4]


def chain(reads):
    """A graph of integers: node i is the difference of the two tensors that `reads(i)` names."""
    shape = (None, 4)
    tensors = {name: Tensor(name, shape, "int32") for name in ("x", "y")}
    nodes = []
    for index in range(8):
        nodes.append(Node(f"n{index}", "logic", reads(index), f"t{index}", {}, {"function": "sub"}))
        tensors[f"t{index}"] = Tensor(f"t{index}", shape, "int32")
    return Graph(tensors, tuple(nodes), ("x", "y"), ("t7",), "nearest_even")


def loops_of(graph):
    return repeats(graph, prepare(graph))


def name(index):
    return f"t{index}" if index >= 0 else ("x", "y")[index]


def test_what_an_iteration_reads():
    graph = chain(lambda i: (name(i - 1) if i else "x", "y"))
    (loop,) = loops_of(graph)
    assert (loop.first, loop.period, loop.count) == (0, 1, 8)
    assert loop.reads == ((Carried(0, "x"), Outside(("y",) * 8)),)
    pairs = chain(lambda i: (name(i - 1) if i else "x", name(i - 1) if i % 2 else "y"))
    (loop,) = loops_of(pairs)
    assert (loop.period, loop.count) == (2, 4)
    assert loop.reads[1] == (Inside(0), Inside(0))


def test_two_states_in_turn_are_one_loop_of_two_nodes():
    (loop,) = loops_of(chain(lambda i: (name(i - 1), name(i - 2))))
    assert (loop.period, loop.count) == (2, 4)
    assert loop.reads[0] == (Carried(1, "y"), Carried(0, "x"))


def test_reads_from_ever_further_back_are_no_loop():
    assert loops_of(chain(lambda i: (name(i - 1), name(i // 2 - 1)))) == ()


def test_few_iterations_stay_as_they_are():
    graph = chain(lambda i: (name(i - 1) if i else "x", "y"))
    few = graph.replace(nodes=graph.nodes[:3], outputs=("t2",))
    assert loops_of(few) == ()


def test_floats_are_never_in_a_loop():
    graph = chain(lambda i: (name(i - 1) if i else "x", "y"))
    floats = {key: Tensor(key, t.shape, "float32") for key, t in graph.tensors.items()}
    assert loops_of(graph.replace(tensors=floats)) == ()


def test_constants_of_iterations_lie_in_one_array():
    layers = {f"n{i}": {"kernel": np.full((2, 2), i, np.int8), "shift": np.int32(7)} for i in range(4)}
    names = list(layers)
    shared = SharedConstants.of(layers, [names])
    assert [leaf.shape for leaf in jax.tree.leaves(shared)] == [(4, 2, 2), ()]
    for key, roles in layers.items():
        assert np.array_equal(shared[key]["kernel"], roles["kernel"])
        assert shared[key]["shift"] == 7
    same, stacked = shared.over(names)
    assert same == {"shift": 7}
    assert np.array_equal(stacked["kernel"][:, 0, 0], range(4))
    # other iterations than those it was made for
    same, stacked = shared.over(names[1:3])
    assert np.array_equal(stacked["kernel"][:, 0, 0], [1, 2])


def test_traced_constants_are_the_same_only_as_one_object():
    @jax.jit
    def total(a, b):
        constants = {f"n{i}": {"one": a, "other": b + i} for i in range(4)}
        shared = SharedConstants.of(constants, [list(constants)])
        same, stacked = shared.over(list(constants))
        assert list(same) == ["one"]
        return stacked["other"].sum() + same["one"]

    assert total(jnp.int32(1), jnp.int32(2)) == 1 + 2 + 3 + 4 + 5


@pytest.mark.exhaustive
def test_stablehlo_has_loops_and_a_free_batch(tmp_path):
    _, graph, x = converted(Recurrent(every=True), (2, 4, 3))
    graph.emit("stablehlo", tmp_path / "model.stablehlo")
    exported = jax.export.deserialize((tmp_path / "model.stablehlo").read_bytes())
    assert "stablehlo.while" in exported.mlir_module()
    wider = jnp.concatenate([x, -x, x])
    codes = graph.quantize(wider)
    assert np.array_equal(exported.call(codes), graph.run(codes))


@pytest.mark.exhaustive
def test_every_iteration_covers_one_node():
    _, graph, _ = converted(Stack(4), (2, 4))
    groups = over_iterations(graph.ir, graph.interpreter.loops)
    names = [entry for group in groups for entry in group]
    assert len(names) == len(set(names))
    kinds = {node.name: node.op for node in graph.ir.nodes}
    assert all(len({kinds[entry] for entry in group}) == 1 for group in groups)
