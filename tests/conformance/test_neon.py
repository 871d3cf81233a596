"""qjax's rules against the instructions of AArch64, executed; and what is said where they cannot be."""

import re
import shutil
from typing import Any

import numpy as np
import pytest

from conformance import accumulators
from conformance.runtimes.neon import Neon
from qjax.numerics import Multiplier, Real, get_rule, requantize
from tests.numerics.exact import RULES

LIMITS: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}
WITH_ZERO_POINT: dict[str, Any] = {"qmin": -(2**30), "qmax": 2**30 - 1}


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda tool: None if "qemu" in tool else f"/usr/bin/{tool}")
    with pytest.raises(ModuleNotFoundError, match=r"Got no qemu-aarch64; .* apt-get install .* qemu-user$"):
        Neon().version()
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"no aarch64-linux-gnu-gcc and no qemu-aarch64; .* gcc-aarch64-linux"
    ):
        Neon().version()


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"rule must be one of neon, double_round, .* Got 'float32'"):
        Neon().requantize("float32", np.array([1], np.int32), 2**30, 0)
    with pytest.raises(TypeError, match=r"acc must be int32. Got int64"):
        Neon().requantize("neon", np.array([1]), 2**30, 0)
    with pytest.raises(TypeError, match=r"scale must be float32. Got float64"):
        Neon().requantize_float("float32", np.array([1], np.int32), 0.5)


@pytest.mark.oracle
def test_the_program_holds_the_instructions_meant():
    code = Neon().disassembly()
    for instruction in ("sqrdmulh", "sqdmulh", "srshl", "sqshl", "fcvtns", "fmla", "fmul", "fadd", "scvtf"):
        assert re.search(rf"\b{instruction}\s+v\d+\.4s", code), instruction


@pytest.mark.oracle
@pytest.mark.parametrize("rule", ["neon", "double_round", "ruy", "single_round", "xnnpack_rndnu"])
def test_fixed_point_rules(rule):
    acc, multiplier, shift = accumulators.all_records()
    if rule == "xnnpack_rndnu":  # its scale is a float32
        multiplier = multiplier & np.int32(~0x7F)
    got = requantize(acc, Multiplier(multiplier, shift), rule=rule, **LIMITS)
    assert np.array_equal(np.asarray(got), Neon().requantize(rule, acc, multiplier, shift))


@pytest.mark.oracle
@pytest.mark.parametrize("rule", ["neon", "double_round", "ruy", "single_round"])
def test_the_oracle_in_python_integers_is_what_the_instructions_do(rule):
    records = accumulators.concatenate(accumulators.random(20), accumulators.near_ties(50))
    want = [RULES[rule](*map(int, record)) for record in zip(*records, strict=True)]
    assert Neon().requantize(rule, *records).tolist() == want


@pytest.mark.oracle
@pytest.mark.parametrize("rule", ["float32", "float32_zero_point_inside", "float32_zero_point_fma"])
def test_float_rules(rule):
    acc, multiplier, shift = accumulators.all_records()
    scale = np.ldexp((multiplier >> 7).astype(np.float64), shift - 24).astype(np.float32)
    zero_point = (np.arange(len(acc)) % 511 - 255).astype(np.int32)
    constants = get_rule(rule).prepare(Real.of(scale))
    if rule == "float32":
        want = Neon().requantize_float(rule, acc, scale)
        got = requantize(acc, constants, rule=rule, **LIMITS)
    else:
        want = np.clip(Neon().requantize_float(rule, acc, scale, zero_point), -(2**30), 2**30 - 1)
        got = requantize(acc, constants, rule=rule, zero_point=zero_point, **WITH_ZERO_POINT)
    assert np.array_equal(np.asarray(got), want)


@pytest.mark.oracle
def test_the_proposed_fix_is_one_rounding_with_ties_up():
    acc, multiplier, shift = accumulators.all_records()
    kept = shift <= 0
    records = acc[kept], multiplier[kept], shift[kept]
    fix = Neon().requantize("proposed_fix", *records)
    assert np.array_equal(fix, Neon().requantize("single_round", *records))
    assert not np.array_equal(fix, Neon().requantize("neon", *records))


@pytest.mark.oracle
def test_shapes_and_scalars():
    acc = np.arange(-15, 15, dtype=np.int32).reshape(2, 3, 5)
    got = Neon().requantize("neon", acc, 3 * 2**29, -1)
    assert got.shape == acc.shape
    assert got.dtype == np.int32
    assert Neon().requantize("srshl", acc, 0, -1).ravel().tolist() == [(v + 1) >> 1 for v in range(-15, 15)]
    assert Neon().requantize("neon", np.zeros((0, 3), np.int32), 2**30, 0).shape == (0, 3)
