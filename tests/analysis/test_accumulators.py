"""Whole models in narrow registers, and the report of what registers need."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import QSpec, Recipe
from qjax.analysis.accumulators import NodeAccumulator, Observed
from qjax.assign.overflow import check_accumulators
from qjax.graph.ir import Quantization
from qjax.lower import ConversionError
from qjax.numerics.accumulator import EXACT, Accumulator, bits_for
from qjax.targets import Target
from tests.layers.round_trip import assert_same, data, train_step
from tests.numerics.registers import paired, saturated, wrapped

UNSIGNED = QSpec(bits=8, signed=False, symmetric=False)


class Net(nnx.Module):
    """A convolution, a depthwise one, a dense layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3, 3), strides=2, feature_group_count=4, rngs=rngs)
        self.dense = nnx.Linear(36, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        x = nnx.relu(self.depthwise(x))
        return self.dense(x.reshape(x.shape[0], -1))


class Dense(nnx.Module):
    def __init__(self, features=3):
        self.dense = nnx.Linear(19, features, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dense(x)


IMAGES, ROWS = data(4, 5, 5, 3), data(6, 19) * 2


def converted(model, sample, accumulator=EXACT, activations=UNSIGNED, **recipe):
    target = Target(f"test {accumulator}", accumulator=accumulator, wide_activations=True)
    qmodel = qjax.quantize(model, Recipe(target=target, activations=activations, **recipe), sample)
    return qmodel, qjax.convert(qmodel, sample)


REGISTERS = (Accumulator(14, "saturate"), Accumulator(12, "wrap"), Accumulator(pairs=True))


@pytest.mark.parametrize("accumulator", REGISTERS, ids=str)
@pytest.mark.exhaustive
def test_exact_equals_the_graph(accumulator, tmp_path):
    qmodel, graph = converted(Net(), IMAGES, accumulator)
    for node in graph.ir.nodes:
        if "kernel" in node.constants:
            assert Accumulator.of_json(node.attributes["accumulator"]) == accumulator
    forward = qjax.exact(qmodel, IMAGES)
    assert_same(jax.jit(forward)(qmodel, IMAGES), graph(IMAGES))
    # it is not the exact graph by another name
    report = qjax.accumulators(graph, [IMAGES])
    assert seen(report.nodes[0]).changed > 0
    assert seen(report.nodes[0]).codes_changed
    # a file keeps the register
    graph.save(tmp_path / "net.qjax")
    again = qjax.load(tmp_path / "net.qjax")
    codes = graph.quantize(IMAGES)
    assert np.array_equal(again.run(codes), graph.run(codes))
    assert [n.attributes for n in again.ir.nodes] == [dict(n.attributes) for n in graph.ir.nodes]


def test_verify_counts_what_the_register_changes():
    qmodel, graph = converted(Dense(), ROWS, Accumulator(12, "wrap"))
    (node,) = qjax.verify(graph, qmodel, [ROWS]).nodes
    (register,) = qjax.accumulators(graph, [ROWS]).nodes
    assert node.compared == seen(register).sums
    assert node.local == node.end_to_end == seen(register).codes_changed
    assert node.local > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_exact_trains_through_a_narrow_register():
    qmodel, _ = converted(Net(), IMAGES, Accumulator(14, "saturate"))
    train_step(qmodel, IMAGES)
    forward = qjax.exact(qmodel, IMAGES)
    value, gradient = nnx.value_and_grad(lambda q: jnp.sum(jnp.square(forward(q, IMAGES))))(qmodel)
    expected = qjax.convert(qmodel, IMAGES)(IMAGES)
    assert float(value) == float(jnp.sum(jnp.square(expected)))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))


@pytest.mark.exhaustive
def test_an_exact_target_writes_no_attribute():
    _, graph = converted(Net(), IMAGES)
    assert all("accumulator" not in node.attributes for node in graph.ir.nodes)


# ---------------------------------------------------------------------------- the report


def seen(node: NodeAccumulator) -> Observed:
    assert node.observed is not None
    return node.observed


def grid_of(graph, name: str) -> Quantization:
    grid = graph.ir.tensors[name].quantization
    assert grid is not None
    return grid


def products_of(graph, x):
    """Raw codes and weights of the one dense layer, as Python's integers: (rows, K) and (K, features)."""
    (node,) = graph.ir.nodes
    codes = np.asarray(graph.quantize(x)).astype(object)
    grid = grid_of(graph, node.inputs[0])
    return codes, graph.ir.constant(node, "kernel").astype(object), int(grid.zero_point), grid


def partials(products):
    return [0, *np.cumsum(np.array(products, object))]


@pytest.mark.parametrize("accumulator", [EXACT, *REGISTERS[:3], Accumulator(17, "wrap", operands="codes")], ids=str)
@pytest.mark.parametrize("activations", [UNSIGNED, QSpec(bits=8, symmetric=False)], ids=["uint8", "int8"])
@pytest.mark.sampled(2)
def test_every_figure_of_one_layer(accumulator, activations):
    _, graph = converted(Dense(), ROWS, accumulator, activations)
    report = qjax.accumulators(graph, [ROWS[:4], ROWS[4:]])
    assert report.examples == 6
    (node,) = report.nodes
    codes, w, z, grid = products_of(graph, ROWS)
    register = accumulator.on(str(np.asarray(graph.quantize(ROWS)).dtype), "int8")
    assert (node.products, node.accumulator, node.op) == (19, register, "dot")
    minus = 0 if register.operands == "codes" else z
    spans = [sorted((int(v) * (grid.qmin - minus), int(v) * (grid.qmax - minus)) for v in w[:, j]) for j in range(3)]
    assert node.low == min(sum(min(pair) for pair in span) for span in spans)
    assert node.high == max(sum(max(pair) for pair in span) for span in spans)
    assert node.bits == bits_for(node.low, node.high)
    assert node.headroom == register.bits - node.bits
    shift = min(grid.qmin, 0)
    low, high = -(2 ** (register.bits - 1)), 2 ** (register.bits - 1) - 1
    sums, every, overflowed, events, changed, pair_events = [], [], 0, 0, 0, 0
    for row in codes:
        for j in range(3):
            products = [(int(c) - minus) * int(v) for c, v in zip(row, w[:, j], strict=True)]
            total = sum(products)
            sums.append(total)
            every += partials(products)
            overflowed += not low <= total <= high
            cut = paired([(int(c) - shift) * int(v) for c, v in zip(row, w[:, j], strict=True)])
            pair_events += cut[1]
            if register.overflow == "saturate":
                held, count = saturated(products, register.bits)
            elif register.overflow == "wrap":
                held, count = wrapped(total, register.bits), 0
            elif register.pairs:
                held, count = cut[0] - z * int(w[:, j].sum()), cut[1]
            else:
                held, count = total, 0
            events += count
            changed += held != total
    found = seen(node)
    assert (found.sums, found.low, found.high) == (18, min(sums), max(sums))
    assert (found.partial_low, found.partial_high) == (min(every), max(every))
    assert (found.bits, found.partial_bits) == (bits_for(min(sums), max(sums)), bits_for(min(every), max(every)))
    assert (found.overflowed, found.saturated, found.changed) == (overflowed, events, changed)
    assert (found.pairs, found.pairs_saturated) == (18 * 10, pair_events)
    assert (found.codes_changed == 0) == (changed == 0)
    padded = np.concatenate([w, np.zeros((1, 3), object)])
    reach = grid.qmax - shift
    risk = sum(
        sum(max(int(v), 0) for v in pair) * reach > 32767 or sum(min(int(v), 0) for v in pair) * reach < -32768
        for j in range(3)
        for pair in zip(padded[0::2, j], padded[1::2, j], strict=True)
    )
    assert (node.weight_pairs, node.pairs_at_risk) == (30, risk)
    assert risk > 0


def test_the_worst_case_is_met_by_some_input():
    _, graph = converted(Dense(1), ROWS)
    (node,) = qjax.accumulators(graph).nodes
    assert node.observed is None
    codes, w, z, grid = products_of(graph, ROWS)
    bias = int(np.ravel(graph.ir.constant(graph.ir.nodes[0], "bias"))[0])
    for bound, total, up in ((node.low, node.total_low, False), (node.high, node.total_high, True)):
        worst = np.where((w[:, 0] > 0) == up, grid.qmax, grid.qmin) - z
        assert int(worst @ w[:, 0]) == bound
        assert bound + bias == total
    assert codes.shape == (6, 19)


@pytest.mark.exhaustive
def test_another_register_can_be_tried():
    _, graph = converted(Net(), IMAGES)
    own = qjax.accumulators(graph, [IMAGES])
    assert own.observed_bits is not None
    assert all(node.accumulator == EXACT and seen(node).changed == 0 for node in own.nodes)
    narrow = qjax.accumulators(graph, [IMAGES], accumulator=Accumulator(own.observed_bits, "saturate"))
    assert all((seen(n).saturated, seen(n).changed, seen(n).codes_changed) == (0, 0, 0) for n in narrow.nodes)
    short = qjax.accumulators(graph, [IMAGES], accumulator=Accumulator(own.observed_bits - 1, "saturate"))
    assert sum(seen(node).saturated for node in short.nodes) > 0
    enough = qjax.accumulators(graph, accumulator=Accumulator(own.bits, "wrap"))
    assert min(node.headroom for node in enough.nodes) == 0
    # what flows through the graph is its own arithmetic
    assert [seen(n).low for n in short.nodes] == [seen(n).low for n in own.nodes]


@pytest.mark.parametrize("activations", [UNSIGNED, QSpec(bits=8, symmetric=False)], ids=["uint8", "int8"])
@pytest.mark.exhaustive
def test_reduced_range_takes_all_pairs_out_of_risk(activations):
    _, wide = converted(Net(), IMAGES, activations=activations)
    qmodel, graph = converted(Net(), IMAGES, activations=activations, reduce_range=True)
    assert any(node.pairs_at_risk for node in qjax.accumulators(wide).nodes)
    report = qjax.accumulators(graph, [IMAGES * 3], accumulator=Accumulator(pairs=True))
    assert [(node.pairs_at_risk, seen(node).pairs_saturated) for node in report.nodes] == [(0, 0)] * 3
    assert [seen(node).changed for node in report.nodes] == [0] * 3
    for node in graph.ir.nodes:
        tensor, grid = graph.ir.tensors[node.output], grid_of(graph, node.output)
        expected = ("uint8", 0, 127) if activations is UNSIGNED else ("int8", -64, 63)
        assert (tensor.dtype, grid.qmin, grid.qmax) == expected
    assert qjax.verify(graph, qmodel, [IMAGES * 3]).exact
    assert_same(qjax.exact(qmodel, IMAGES)(qmodel, IMAGES * 3), graph(IMAGES * 3))


def test_wide_codes_have_no_pairs():
    _, graph = converted(Dense(), ROWS, activations=QSpec(bits=16))
    (node,) = qjax.accumulators(graph, [ROWS]).nodes
    assert (node.weight_pairs, node.pairs_at_risk, seen(node).pairs, seen(node).pairs_saturated) == (None,) * 4
    assert node.bits > 20


@pytest.mark.filterwarnings("ignore:quantize. the model trains")
def test_sums_beyond_32_bits_are_counted():
    class Long(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(3000, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dense(x)

    model, x = Long(), jnp.full((2, 3000), 0.7).at[0].multiply(-1)
    model.dense.kernel[...] = jnp.ones((3000, 2)).at[:, 1].set(0.5)
    wide = QSpec(bits=16)
    with pytest.raises(ConversionError, match=r"may reach \d{11,}, beyond int32"):
        converted(model, x, activations=wide)
    _, graph = converted(model, x, Accumulator(32, "saturate"), activations=wide, weights=QSpec(bits=8))
    (node,) = qjax.accumulators(graph, [x]).nodes
    code = int(np.asarray(graph.quantize(x))[1, 0])
    kernel = graph.ir.constant(graph.ir.nodes[0], "kernel").astype(object)
    assert seen(node).high == code * int(kernel[:, 0].sum()) > 2**31
    assert seen(node).low == -seen(node).high
    assert (seen(node).overflowed, seen(node).changed) == (4, 4)
    assert seen(node).codes_changed is None
    steps = [code * int(kernel[0, 0]), code * int(kernel[0, 1])]
    assert (kernel * code == np.array(steps, object)).all()
    expected = sum(int(s * k >= 2**31) + int(s * k > 2**31) for s in steps for k in range(1, 3001))
    assert seen(node).saturated == expected


def test_the_table():
    _, graph = converted(Net(), IMAGES, Accumulator(14, "saturate"))
    lines = str(qjax.accumulators(graph)).splitlines()
    assert lines[0].split()[:4] == ["node", "op", "products", "register"]
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["conv", "conv", "27"],
        ["depthwise", "conv", "9"],
        ["dense", "dot", "36"],
    ]
    report = qjax.accumulators(graph, [IMAGES])
    assert f"{report.examples} examples needed {report.observed_bits}" in str(report)
    assert "14 saturate" in str(report)
    with pytest.raises(ValueError, match="expected at least one batch, got none"):
        qjax.accumulators(graph, [])


# ---------------------------------------------------------------------------- the proof


def test_a_register_that_wraps_or_saturates_needs_no_proof_but_its_bias_does():
    _, graph = converted(Dense(), ROWS, Accumulator(12, "wrap"))
    (node,) = graph.ir.nodes
    bias = graph.ir.tensors[node.constants["bias"]]

    def with_register(accumulator, value):
        attributes = {**node.attributes, "accumulator": accumulator.to_json()}
        tensors = {**graph.ir.tensors, bias.name: dataclasses.replace(bias, value=np.full_like(bias.value, value))}
        return graph.ir.replace(nodes=(dataclasses.replace(node, attributes=attributes),), tensors=tensors)

    top = 2**31 - 1
    for accumulator, reached in (
        (Accumulator(12, "wrap"), 2**11 - 1),
        (Accumulator(9, "saturate"), 2**8 - 1),
    ):
        check_accumulators(with_register(accumulator, top - reached))
        with pytest.raises(ConversionError, match=rf"may reach {2**31}, beyond int32"):
            check_accumulators(with_register(accumulator, top - reached + 1))
    # no register of up to 31 bits leaves int32 with the biases that the conversion makes
    for bits in (30, 31):
        check_accumulators(with_register(Accumulator(bits, "saturate"), 2**30))
        check_accumulators(with_register(Accumulator(bits, "wrap"), -(2**30)))
