"""Every row of the matrix: the same integers through the runtime, or its recording, and through qjax."""

import re
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest

from conformance import cpu, golden, single
from conformance.__main__ import main
from conformance.case import Case
from conformance.cpu import is_this
from conformance.matrix import InputRow, Row, compare
from conformance.rows import ADAPTERS, ROWS
from qjax import ops, targets
from qjax.numerics.lookup import FUNCTIONS

LIVE = ("litert-reference", "litert-optimized |", "litert-xnnpack |", "onnxruntime |", "onnxruntime-qdq")
"""Runtimes that the test environment holds: their rows must be answered by the runtime itself."""


def ids(row):
    return re.sub(r"[^a-zA-Z0-9]+", "-", row.key)


def one_of_each_runtime() -> set[str]:
    """The keys of a row of each runtime, another operation in turn."""
    chosen: set[str] = set()
    for turn, runtime in enumerate(dict.fromkeys(row.runtime for row in ROWS)):
        rows = [row for row in ROWS if row.runtime == runtime]
        chosen.add(rows[5 * turn % len(rows)].key)
    return chosen


SOME = one_of_each_runtime()


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if row.key in SOME else [pytest.mark.exhaustive]) for row in ROWS], ids=ids
)
def test_row(row):
    result = compare(row, ADAPTERS[row.runtime])
    assert result.compared > 0
    assert result.source == "live" or not row.key.startswith(LIVE)
    assert result.passed, f"{result.mismatches} of {result.compared} differ from {result.version} ({result.source})"
    # a row that claims no equality says by how much it fails
    assert row.exact or (row.note and result.mismatches < result.compared // 200)


_first: dict[str, Case] = {}


def first_case(cases: Callable[[], Sequence[Case]]) -> Case:
    """The first of a row's cases, made once for all rows that make them alike."""
    # the arguments of a partial are in its text; what has none has its address
    if repr(cases) not in _first:
        _first[repr(cases)] = cases()[0]
    return _first[repr(cases)]


def test_the_operation_of_every_row_makes_a_graph():
    """Few of the rows above are in every run; a node that lacks an attribute must fail in every run."""
    names = {name for name in ops.names() if ops.get(name).fields}
    made, seen = set(), set()
    for row in ROWS:
        if isinstance(row, Row) and not isinstance(row, InputRow):
            # several runtimes have the same cases, and some of them the same target
            if (same := (repr(row.cases), row.target)) in seen:
                continue
            seen.add(same)
            case = first_case(row.cases)
            if case.op in ("quantize", "softmax") or case.op in FUNCTIONS:
                continue  # computed without a graph
            graph = single.graph_of(case, targets.get(row.target))
            made.add(graph.nodes[0].op)
    assert made <= names
    assert {"dot", "conv", "add", "multiply", "window_sum", "sum"} <= made


@pytest.mark.oracle
@pytest.mark.parametrize("row", [row for row in ROWS if not row.key.startswith(LIVE)], ids=ids)
def test_row_live(row):
    """A row that only another CPU can compute is compared with its recording."""
    result = compare(row, ADAPTERS[row.runtime])
    assert result.source == ("live" if is_this(row.cpu) else "golden")
    assert result.passed, f"{result.mismatches} of {result.compared} differ from {result.version}"


@pytest.mark.parametrize(
    ("flags", "fitting"),
    [
        ((), {"any", "no VNNI", "no AVX-512 VNNI"}),
        (("avx_vnni",), {"any", "no AVX-512 VNNI"}),
        (("avx512f", "avx512_vnni"), {"any", "AVX-512 VNNI"}),
    ],
)
def test_a_row_of_another_cpu_is_not_asked_here(monkeypatch, flags, fitting):
    monkeypatch.setattr(cpu, "flags", lambda: frozenset(flags))
    assert {name for name in get_args(cpu.Cpu) if is_this(name)} == fitting
    for row in [row for row in ROWS if row.cpu not in fitting][:2]:
        assert compare(row, lambda: pytest.fail("asked")).source == "golden"
    if "AVX-512 VNNI" in fitting:
        assert main(["--record", "torch-x86"]) == 2


def test_rows_are_distinct_and_name_known_targets():
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert not row.target or row.target in targets.names()


def test_a_recording_keeps_every_answer_in_its_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    answers = np.random.default_rng(0).integers(-128, 128, 100_000)
    golden.save("some", golden.Recording("some 1.0", {"some | op": golden.Answers.of(answers)}))
    found = golden.load("some")
    assert found is not None
    assert found.version == "some 1.0"
    assert found.rows["some | op"].mismatches(answers) == 0
    for position in (0, 7, 99_999):
        changed = answers.copy()
        changed[position] += 1
        assert found.rows["some | op"].mismatches(changed) >= 1
    with pytest.raises(ValueError, match="expected 100000 answers, got 99999"):
        found.rows["some | op"].mismatches(answers[1:])
    assert golden.load("none") is None
    golden.load.cache_clear()


def test_the_command_prints_the_matrix(capsys):
    assert main(["--recorded", "neon | SQRDMULH, SRSHL"]) == 0
    text = capsys.readouterr().out
    assert "qemu-aarch64" in text
    assert "2 of 2 rows that claim equality hold, 790872 codes compared" in text
    assert main(["no such runtime"]) == 2
    assert "No row contains any of" in capsys.readouterr().err


def test_a_runtime_without_answers_does_not_pass(monkeypatch, tmp_path):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    golden.load.cache_clear()
    row = next(row for row in ROWS if row.runtime == "neon")

    def missing():
        raise ModuleNotFoundError("not here")

    result = compare(row, missing)
    golden.load.cache_clear()
    assert (result.source, result.passed) == ("missing", False)
