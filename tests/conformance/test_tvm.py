"""qjax's rules against code that TVM compiles; and what is said where it is not installed."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import accumulators
from conformance.runtimes.neon import Neon
from conformance.runtimes.tvm import Tvm
from qjax.numerics import Multiplier, requantize

LIMITS: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}
MULTIPLIERS = (2**30, 3 * 2**29, 1518500250)


def ours(rule: str, records: accumulators.Records) -> np.ndarray:
    constants = Multiplier(records.multiplier, records.shift)
    return np.asarray(requantize(records.acc, constants, rule=rule, **LIMITS))


def only(records: accumulators.Records, kept: np.ndarray) -> accumulators.Records:
    return accumulators.Records(*(column[kept] for column in records))


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package apache-tvm. Got: No module named 'tvm'; pip"):
        Tvm().version()


def test_wrong_arguments():
    one = np.array([1], np.int32)
    with pytest.raises(ValueError, match=r"rule must be one of tvm, single_round, neon. Got 'ruy'"):
        Tvm().requantize("ruy", one, 2**30, 0)
    with pytest.raises(TypeError, match=r"multiplier must be int32. Got float64"):
        Tvm().requantize("tvm", one, 0.5, 0)
    with pytest.raises(ValueError, match=r"of shape \(layers, rows, columns\). Got \(1,\)"):
        Tvm().requantize_arm(one, one, one)


@pytest.mark.oracle
def test_default_lowering():
    records = accumulators.edges(multipliers=MULTIPLIERS)
    records = only(records, (records.multiplier != 2**30) | ~np.isin(records.shift, (1, -31)))
    got = Tvm().requantize("tvm", *records)
    assert np.array_equal(ours("tvm", records), got)
    # Where the path for powers of two wraps in 32 bits it is not single_round.
    assert not np.array_equal(ours("single_round", records), got)


@pytest.mark.oracle
def test_lowering_per_axis():
    records = accumulators.all_records()
    exact = records.acc.astype(object) * records.multiplier
    shift = 31 - records.shift.astype(object)
    exact = (exact + 2 ** (shift - 1)) // 2**shift
    got = Tvm().requantize("single_round", *records)
    assert np.array_equal(got, (exact.astype(np.int64)).astype(np.int32)), "wraps to int32"
    fits = records.shift <= 0
    assert np.array_equal(got[fits], ours("single_round", only(records, fits)))


@pytest.mark.oracle
@pytest.mark.parametrize("shift", [1, -31])
def test_powers_of_two_that_do_not_compile(shift):
    with pytest.raises(ValueError, match=rf"2\^30 with shift 1 or -31: .* Got shift {shift}; leave such records out"):
        Tvm().requantize("tvm", np.array([3], np.int32), 2**30, shift)
    # It is TVM that cannot, not this adapter.
    code = f"from conformance.runtimes import tvm as t; t._tvm().compile(t._dynamic_layer('f', 2**30, {shift}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert ("Shift amount must be non-negative" if shift == 1 else "exceeds range of int32") in done.stderr


@pytest.mark.oracle
def test_old_neon_lowering_is_the_two_instructions():
    records = accumulators.edges(shifts=range(-31, 31, 6), multipliers=MULTIPLIERS)
    got = Tvm().requantize("neon", *records)
    assert np.array_equal(got, Neon().requantize("neon", *records))
    assert np.array_equal(got, ours("neon", records))


@pytest.mark.oracle
@pytest.mark.parametrize(("columns", "registered", "rule"), [(12, True, "neon"), (11, True, "tvm"), (12, False, "tvm")])
def test_columns_decide_the_path(columns, registered, rule):
    shifts = np.array([-9, -4, -1, 0, 2], np.int32)
    multipliers = np.array([1518500250, 3 * 2**29, 2**31 - 1, 1518500251, 5 * 2**28], np.int32)
    acc = np.resize(accumulators.near_ties(100).acc >> 3, (5, 40, columns))
    got = Tvm().requantize_arm(acc, multipliers, shifts, neon_lowering=registered)
    constants = Multiplier(multipliers[:, None, None], shifts[:, None, None])
    assert np.array_equal(got, np.asarray(requantize(acc, constants, rule=rule, **LIMITS)))
    assert ("sqrdmulh" in Tvm().arm_assembly(columns, 1518500250, -4, neon_lowering=registered)) == (rule == "neon")


@pytest.mark.oracle
def test_relay_and_its_roundings_are_gone():
    package = importlib.util.find_spec("tvm")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    assert not (root / "relay").exists()
    for path in root.rglob("*.py"):
        text = path.read_text()
        assert "TONEAREST" not in text, path
        assert "UPWARD" not in text, path
