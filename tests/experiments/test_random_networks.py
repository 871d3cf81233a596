"""Random networks: the graph, its copies, the exact forward, C and ONNX agree; what is wrong is told, and kept."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import qjax
from experiments.random_networks import __main__ as command
from experiments.random_networks import checks
from experiments.random_networks.checks import Case, Row, case_of, class_of, run
from experiments.random_networks.grammar import Program, Step, network_of


@pytest.fixture(autouse=True)
def users_promotion():
    """The networks are written as users write them, under JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# few bits on random data keep little of a tensor; that is no disagreement
@pytest.mark.filterwarnings("ignore:Quantizer .* keeps .* dB:UserWarning")
# and random recipes ask for what their networks do not have
@pytest.mark.filterwarnings("ignore:quantize. (only products|a part|the model trains|parts under):UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sampled(1)
@pytest.mark.exhaustive
def test_everything_agrees(seed):
    """Two steps each: XLA takes seconds for more."""
    row = run(seed, most=2, sparse=True)
    assert row.found == []
    assert row.compared or row.refused


def test_a_seed_is_a_network():
    first, second = case_of(5), case_of(5)
    assert (first.program, first.recipe, first.target) == (second.program, second.recipe, second.target)
    leaves = zip(jax.tree.leaves(first.batch(0)), jax.tree.leaves(second.batch(0)), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)
    assert str(case_of(6).program) != str(first.program)


@pytest.mark.exhaustive
def test_what_differs_and_what_breaks_is_found(monkeypatch):
    def planted(name, graph, folder, batch, options):
        if name == "c":
            raise KeyError("planted")
        return lambda codes: [np.zeros((1, 1), np.int8)]

    dense = Step("dense", (0,), (("inputs", 3), ("features", 2), ("bias", True)), "dense1")
    program = Program(((3,),), 0, (dense,), (1,))
    case = Case(7, "nearest_even", program, qjax.Recipe(), network_of(program, np.random.default_rng(0)))
    monkeypatch.setattr(checks, "case_of", lambda *args: case)
    monkeypatch.setattr(checks.runtimes, "prepare", planted)
    row = run(7, stages=("c", "onnx"))
    assert row.kind == "found"
    assert row.found[0].startswith("c: KeyError at tests")
    assert row.found[1].startswith("onnx: output 0 is int8(1, 1), not ")
    text = command.tally([row])
    assert "FOUND --seed 7" in text
    assert "1 networks: 1 found" in text


def test_a_clear_error_is_a_refusal_and_is_counted_by_its_text(monkeypatch):
    row = Row(0)
    try:
        qjax.QSpec(bits=99)
    except ValueError as error:
        checks._judge(row, "quantize", error)
    assert row.refused == {"quantize": "ValueError: QSpec: bits must lie in N..N. Got N"}
    assert row.kind == "refused"
    assert class_of("model.py:12: 'a' on 3x4 has 7") == class_of("other.py:9: 'b' on 5x6x7 has -1.5")


def test_rows_are_kept_and_a_line_cut_short_is_run_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    for seed in (0, 1):
        command.keep(path, Row(seed, compared={"graph": 3}))
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(Row(2)))[:20])
    asked: list[list[int]] = []
    monkeypatch.setattr(command, "_apart", lambda seeds, args: asked.append(seeds) or [Row(s) for s in seeds])
    rows = command.main(["--rows", str(path), "--count", "4"])
    assert asked == [[2, 3]]
    assert [row.seed for row in rows] == [0, 1, 2, 3]
    command.keep(path, Row(2))
    assert [row.seed for row in command.rows_in(path)] == [0, 1, 2]
