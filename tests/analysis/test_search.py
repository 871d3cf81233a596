"""A search keeps its budget, is the best of all combinations of its figures, and reports what was measured."""

import itertools
import json

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.analysis.models import Small, coarse, data

X = data(16, 4)
LABELS = np.arange(16) % 3
RECIPE = coarse(8, output_bits=8)
WIDTHS = {"2": 2, "8": 8, "float": 32}


def agreement(output, batch):
    """The share of examples on which the float model's class is chosen."""
    return np.mean(np.argmax(np.asarray(output), -1) == np.argmax(np.asarray(Small()(batch)), -1))


@pytest.fixture(scope="module")
def by_size():
    return qjax.search(Small(), RECIPE, X, [X], budget=qjax.Budget(size=60), candidates=(2, 8, "float"))


def best_of_all(result, fits):
    """The least sum of noise over every combination that fits, by brute force."""
    names = [list(row.candidates) for row in result.layers]
    sums = {}
    for picks in itertools.product(*names):
        total = 0.0
        for row, pick in zip(result.layers, picks, strict=True):
            total += row.candidates[pick].noise
        if fits(picks):
            sums[picks] = total
    return min(sums.values()), sums


def test_the_choice_is_the_best_of_all_within_the_size(by_size):
    parameters = [row.parameters for row in by_size.layers]
    assert parameters == [32, 48, 18]

    def size(picks):
        return sum(n * WIDTHS[p] for n, p in zip(parameters, picks, strict=True)) / 8

    least, sums = best_of_all(by_size, lambda picks: size(picks) <= 60)
    chosen = tuple(str(row.bits) for row in by_size.layers)
    assert sums[chosen] == least
    assert by_size.optimal
    assert by_size.size == -(-size(chosen) // 1) <= 60
    assert {row.bits for row in by_size.layers} > {2}


def test_what_was_measured_is_what_its_recipe_gives(by_size):
    qmodel = qjax.quantize(Small(), by_size.recipe, X)
    again = qjax.sensitivity(qmodel, [X])
    assert by_size.measured.noise == again.all.noise > 0
    specs = {name: q.spec for name, q in qmodel.plan.quantizers}
    for row in by_size.layers:
        assert specs[f"{row.name}/kernel"].bits == row.bits
        assert row.input_bits == 8  # a budget of bytes leaves the activations alone
    # the sum of the parts, the part that is not varied included, in the units of a sum
    chosen = sum(row.candidates[str(row.bits)].noise for row in by_size.layers)
    assert by_size.predicted.noise > chosen
    assert [point.name for point in by_size.uniform] == ["2", "8"]
    assert by_size.uniform[0].measured.noise > by_size.measured.noise > by_size.uniform[1].measured.noise


def test_table_json_and_picture(by_size, tmp_path):
    text = str(by_size)
    assert text.splitlines()[-1] == "budget: 60 bytes; 16 examples"
    assert f"{by_size.measured.sqnr:.2f}" in text
    document = json.loads(by_size.to_json())
    assert [layer["bits"] for layer in document["layers"]] == [row.bits for row in by_size.layers]
    assert document["measured"]["noise"] == by_size.measured.noise
    by_size.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


class Shared(nnx.Module):
    """Two layers read one tensor; `kept` has an override of its own; `loose` shares its module with another weight."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.left, self.right = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.kept = nnx.Linear(4, 4, rngs=rngs)
        self.loose = nnx.Param(jax.random.normal(jax.random.key(1), (4, 3)))

    def __call__(self, x):
        y = nnx.relu(self.left(x)) + self.right(x)
        return nnx.relu(self.kept(y)) @ self.loose[...]


@pytest.mark.exhaustive
def test_products_of_bits_choose_inputs_too_and_overrides_stay():
    recipe = coarse(8, overrides={"kept/kernel": qjax.QSpec(bits=5, axis=-1)})
    found = qjax.search(
        Shared(), recipe, X, [X], budget=qjax.Budget(mac_bits=8000, size=100), candidates=(4, 8, "float")
    )
    rows = {row.name: row for row in found.layers}
    assert list(rows) == ["left", "right", "loose"]
    assert rows["left"].bits == rows["right"].bits
    assert "float" not in rows["loose"].candidates
    specs = {name: q.spec.bits for name, q in qjax.quantize(Shared(), found.recipe, X).plan.quantizers}
    assert specs["kept/kernel"] == 5
    inputs = {"left": "input", "right": "input", "loose": "kept"}
    total = 16 * 5 * specs["add"]
    for name, row in rows.items():
        if row.bits != "float":
            assert (specs[inputs[name]], row.input_bits) == (row.bits, row.bits)
        total += row.mac_bits
    assert found.mac_bits == total <= 8000
    assert found.size <= 100


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:quantize. a part of the recipe has no effect")  # every weight became a float
def test_a_layer_in_reals_and_the_smallest_within_a_drop():
    found = qjax.search(
        Small(),
        coarse(8, overrides={"first": qjax.FLOAT}),
        X,
        iter([X[:8], X[8:]]),
        budget=qjax.Budget(metric_drop=0.0),
        candidates=(2, "float"),
        metric=agreement,
        calibration=[X],
        activations=True,
    )
    assert [row.name for row in found.layers] == ["middle", "last"]
    assert found.metric == 1.0
    assert found.measured.metric == 0.0
    # every smaller choice that was measured dropped by more
    drops = [-float(p.measured.metric) for p in found.tried if p.size < found.size and p.measured.metric is not None]
    assert drops
    assert min(drops) > 0
    floats = {row.name for row in found.layers if row.bits == "float"}
    assert floats
    qmodel = qjax.quantize(Small(), found.recipe, X)
    weights = {name for name, _ in qmodel.plan.quantizers if name.endswith("kernel")}
    assert weights == {f"{name}/kernel" for name in {"middle", "last"} - floats}


def test_what_cannot_be_asked_for():
    budget = qjax.Budget(size=10)

    def search(**changes):
        return qjax.search(Small(), RECIPE, X, [X], **{"budget": budget, "candidates": (8,), **changes})

    with pytest.raises(ValueError, match=r"no choice is within the budget of 10 bytes\. The least size is 98 bytes"):
        search()
    with pytest.raises(ValueError, match=r"from 2 to 16, or \"float\", got 1"):
        search(candidates=(1, 8))
    with pytest.raises(ValueError, match="at least one number of bits"):
        search(candidates=("float",))
    with pytest.raises(ValueError, match="metric_drop needs metric="):
        search(budget=qjax.Budget(metric_drop=0.1))
    with pytest.raises(ValueError, match="by='loss' needs loss="):
        search(by="loss")
    with pytest.raises(TypeError, match=r"expected a qjax\.Budget, got int"):
        search(budget=10)
    with pytest.raises(ValueError, match="at least one of size, mac_bits, metric_drop, got none"):
        qjax.Budget()
    with pytest.raises(ValueError, match=r"size: expected a finite number of 0 or more, got -1"):
        qjax.Budget(size=-1)
    everything = dict.fromkeys(("first", "middle", "last"), qjax.FLOAT)
    with pytest.raises(ValueError, match="expected layers to choose bits for"):
        qjax.search(Small(), coarse(8, overrides=everything), X, [X], budget=budget)
