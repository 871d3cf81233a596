"""Recurrent networks in C: one loop over the steps, with the interpreter's codes."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.export.emit.c import to_files
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.memory import Access, in_order
from qjax.export.emit.c.program import build
from qjax.graph.ir import Graph, Node, Tensor
from tests.analysis.models import data
from tests.export.emit.c_build import SANITIZERS, Compiled
from tests.lower.test_products import Recurrent as Inputs
from tests.lower.test_products import in_the_loop, quantized
from tests.run.test_find_loops import Both, Recurrent, Stack, converted, recurrent

BATCH = 2


def chain(reads, outputs=("t7",)):
    """Node i is the difference of the two tensors that `reads(i)` names."""
    tensors = {name: Tensor(name, (None, 4), "int32") for name in ("x", "y")}
    tensors |= {f"t{i}": Tensor(f"t{i}", (None, 4), "int32") for i in range(8)}
    nodes = tuple(Node(f"n{i}", "logic", reads(i), f"t{i}", {}, {"function": "sub"}) for i in range(8))
    return Graph(tensors, nodes, ("x", "y"), outputs, "nearest_even")


def before(index):
    return f"t{index}" if index >= 0 else ("x", "y")[index]


CHAINS = {
    "state": chain(lambda i: (before(i - 1), "y")),
    "every_step": chain(lambda i: (before(i - 1), "y"), tuple(f"t{i}" for i in range(8))),
    "middle_step": chain(lambda i: (before(i - 1), "y"), ("t7", "t3")),
    "two_states": chain(lambda i: (before(i - 1), before(i - 2))),
    # the state is read again behind the node that replaces it
    "old_state": chain(lambda i: (before(i - 1), "x") if i % 2 == 0 else (before(i - 1), before(i - 3))),
    "no_loop": chain(lambda i: (before(i - 1), before(i // 2 - 1))),
}


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    rng = np.random.RandomState(0)
    given = {}
    models = {
        "last": (Recurrent(), (BATCH, 4, 3)),
        "steps": (Recurrent(every=True, reverse=True), (BATCH, 4, 3)),
        # the LSTM stands among the products below
        "both": (Both(), (BATCH, 4, 3)),
        "layers": (Stack(5), (BATCH, 4)),
    }
    for name, (model, shape) in models.items():
        _, graph, x = recurrent(4) if name == "last" else converted(model, shape)
        given[name] = (graph.ir, [np.asarray(graph.quantize(x))])
    for name, graph in CHAINS.items():
        given[name] = (graph, [rng.randint(-1000, 1000, (BATCH, 4)).astype(np.int32) for _ in range(2)])
    return Compiled(given, tmp_path_factory.mktemp("loops"), BATCH)


def test_codes_are_those_of_the_interpreter(networks):
    networks.assert_equal(networks.run(*SANITIZERS))


@pytest.mark.parametrize(
    ("name", "loops", "steps"),
    [("state", 1, 2), ("every_step", 1, 10), ("two_states", 1, None), ("old_state", 1, None), ("no_loop", 0, 8)],
)
def test_which_chains_are_loops(networks, name, loops, steps):
    program = networks.programs[name]
    assert len(program.loops) == loops
    if steps is not None:
        # those of a body, a copy for each state, one for each further output
        assert len(program.steps) == steps


@pytest.mark.parametrize(("name", "loops"), [("last", 1), ("steps", 1), ("both", 2), ("layers", 0)])
def test_loops_of_networks(networks, name, loops):
    assert len(networks.programs[name].loops) == loops


@pytest.mark.exhaustive
def test_code_does_not_grow_with_the_steps():
    sizes = {}
    for steps in (4, 8):
        _, graph, _ = recurrent(steps)
        sizes[steps] = to_files(graph.ir, vectors=0)["model.c"].count("static void")
    assert sizes[4] == sizes[8]


def test_the_last_step_alone_needs_no_memory_for_the_others():
    # the state is in the output's place
    assert build(CHAINS["state"], 1, Source()).plan.size == 0


def test_pieces_that_lie_in_order():
    rows = [Access("m", 3 + 4 * i) for i in range(5)]
    assert in_order(rows) == Access("m", 3, 4)
    assert in_order(rows[::-1]) == Access("m", 19, -4)
    for wrong in ([*rows[:4], Access("m", 20)], [*rows[:4], Access("n", 19)], [Access("m", 0, 4), Access("m", 4, 4)]):
        assert in_order(wrong) is None


def test_restrict_is_left_out_where_memory_is_shared(networks):
    # a function that reads one step's slot of a stack and writes the next one's gets two pointers into one array
    for program in networks.programs.values():
        for step, loop in itertools.product(program.steps, program.loops):
            shared = [access for access in step.inputs if access.memory == step.output.memory]
            if shared and loop.first <= program.steps.index(step) < loop.last:
                head = next(line for line in networks.text.split("\n") if f"static void {step.name}(" in line)
                assert "restrict out" not in head


class Softmax(nnx.Module):
    def __call__(self, x):
        return jax.nn.softmax(x)


@pytest.mark.exhaustive
def test_a_division_stands_outside_of_the_loops_that_it_does_not_depend_on():
    """And a looked-up table is computed when the file is written."""
    x = jax.random.normal(jax.random.key(0), (3, 5, 7))
    graph = qjax.convert(qjax.quantize(Softmax(), qjax.Recipe(target="onnxruntime"), x), x)
    text = to_files(graph.ir, vectors=0)["model.c"]
    lines = text[text.index("static void") :].splitlines()
    (division,) = [line for line in lines if "div_i64(" in line]
    (result,) = [line for line in lines if line.strip().startswith("out[")]
    depths = [len(line) - len(line.lstrip()) for line in (division, result)]
    assert division.strip().startswith("const int64_t quotient = div_i64(")
    assert depths[0] < depths[1]
    assert text.count("div_i64(") == 2
    assert "clz_i64(exponent" not in text
    assert "static const int64_t model_softmax_table" in text
    codes = np.asarray(graph.quantize(x))
    assert np.array_equal(np.asarray(graph.native(3).run(codes)), np.asarray(graph.run(codes)))


class Normalized(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(12, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.nn.softmax(self.norm(x))


def test_arithmetic_on_a_sum_stands_outside_of_the_loop_over_its_row():
    """So that a compiler which inlines little does not invert a sum for each element."""
    x = jax.random.normal(jax.random.key(0), (3, 100, 12))
    graph = qjax.convert(qjax.quantize(Normalized(), qjax.Recipe(target="tflite_micro"), x), x)
    text = to_files(graph.ir, vectors=0)["model.c"]
    newton = "1515870810"
    for layer, work in (("softmax", newton), ("norm_normalize", "div_i64(")):
        body = text[text.index(f"static void model_{layer}(") :].split("\n}")[0].splitlines()
        rows = [line for line in body if line.strip().startswith("const") and "of_sum" in line]
        (result,) = [line for line in body if line.strip().startswith("out[")]
        assert rows
        assert all(line.index("const") < result.index("out[") for line in rows)
        functions = [line.split("= ")[1].split("(")[0] for line in (*rows, result)]
        *of_rows, of_element = (text[text.index(f" {name}(") :].split("\n}")[0] for name in functions if name)
        assert any(work in function for function in of_rows)
        assert work not in of_element
    codes = np.asarray(graph.quantize(x))
    assert np.array_equal(np.asarray(graph.native(3).run(codes)), np.asarray(graph.run(codes)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["tflite_micro", "cmsis_nn", "tflite_reference"])
def test_exponentials_of_many_codes_are_a_table(target):
    for rows, has_table in ((40, True), (5, False)):
        x = jax.random.normal(jax.random.key(0), (3, rows, 32))
        graph = qjax.convert(qjax.quantize(Softmax(), qjax.Recipe(target=target), x), x)
        text = to_files(graph.ir, vectors=0)["model.c"]
        assert ("static const int32_t model_softmax_table[256]" in text) == has_table
        codes = np.asarray(graph.quantize(x))
        assert np.array_equal(np.asarray(graph.native(3).run(codes)), np.asarray(graph.run(codes)))


@pytest.fixture(
    scope="module", params=[("lstm", "by_place"), pytest.param(("gru",), marks=pytest.mark.exhaustive)], ids="-".join
)
def products(request):
    """Networks whose graphs have one product of all frames, the same graphs with a product in each step, and inputs."""
    found = {}
    for name, cell, features, target in (
        ("gru", nnx.GRUCell, 4, "nearest_even"),
        ("lstm", nnx.LSTMCell, 4, "nearest_even"),
        # this rule rounds one row otherwise than several
        ("by_place", nnx.GRUCell, 8, "tflite_optimized_arm"),
    ):
        if name not in request.param:
            continue
        x = data(1, 4, features)
        qmodel = quantized(Inputs(cell, features), qjax.Recipe(target=target), x)
        graph = qjax.convert(qmodel, x)
        found[name] = graph.ir, in_the_loop(qmodel, x).ir, np.asarray(graph.quantize(x))
    return found


@pytest.mark.exhaustive
def test_a_step_has_its_own_product_and_no_more_memory(products):
    for name, (graph, slow, _) in products.items():
        graph, slow = (build(one, 1, Source()) for one in (graph, slow))
        assert (len(graph.loops), len(slow.loops)) == (1, 1)
        assert (graph.plan.size > slow.plan.size) == (name == "by_place")


def test_products_in_steps_have_the_codes_of_all_at_once(products, tmp_path):
    compiled = Compiled({name: (graph, [codes]) for name, (graph, _, codes) in products.items()}, tmp_path, 1)
    compiled.assert_equal(compiled.run(*SANITIZERS))
