"""Artifacts that ask for much memory or time cost little; and any attribute survives."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.export.artifact import ArtifactError, from_bytes, to_bytes
from qjax.export.document import MAX_TEXT
from tests.export.graphs import constant, differences, graph_of, quantization
from tests.export.sealed import REFUSED, SMALL, build, parts, structure_of, with_document_text

MILLIONS = 15 * 2**20


def claim_8_gib() -> bytes:
    document, arrays, data = parts(SMALL)
    arrays["value:m"] |= {"shape": [2**31 - 1], "data_offsets": [0, 4 * (2**31 - 1)]}
    return build(document, arrays, data)


def claim_2_eib_packed() -> bytes:
    document, arrays, data = parts(SMALL)
    document["tensors"][1]["shape"] = [2**31 - 1, 2**31 - 1]
    return build(document, arrays, data)


BOMBS = {
    "8 GiB": claim_8_gib,
    "2 EiB packed": claim_2_eib_packed,
    "brackets": lambda: with_document_text("[" * MILLIONS),
    "braces": lambda: with_document_text('{"":' * (MILLIONS // 6)),
    "lists": lambda: with_document_text("[" + "[]," * (MILLIONS // 3) + "[]]"),
    "half a million lists": lambda: with_document_text("[" + "[]," * 490_000 + "[]]"),
    "digits": lambda: with_document_text("1" * MILLIONS),
    "keys": lambda: with_document_text("{" + ",".join(f'"{i}":0' for i in range(300_000)) + "}"),
    "text": lambda: with_document_text('"' + "\u4e2d" * (MILLIONS // 7) + '"'),
    "escapes": lambda: with_document_text('"' + "\\n" * (MILLIONS // 4) + '"'),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.sampled(3)
def test_bombs_cost_little(name):
    file = BOMBS[name]()
    structure = len(structure_of(file))
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(REFUSED):
            from_bytes(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A list of nothing takes 2 bytes in JSON and about 60 in Python: the limit on values caps it.
    limit = min(2**20 + 50 * (len(file) + structure), 256 * 2**20)
    assert peak < limit, f"{peak / 2**20:.0f} MiB for {len(file) / 2**20:.1f} MiB"
    assert time.process_time() - begin < 20


def test_reading_costs_little_more_than_the_arrays():
    codes = np.resize(np.arange(-8, 8), 4_000_000)
    file = to_bytes(graph_of(constant("a", codes, "int8"), constant("b", codes, "int8", quantization(-8, 7))))
    assert len(file) < 6_010_000
    tracemalloc.start()
    try:
        from_bytes(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(file)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.recursive(SCALARS | FINITE, lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_any_attribute_round_trips(value):
    graph = graph_of(value=[value], metadata={"m": {"n": value}})
    assert differences(graph, from_bytes(to_bytes(graph))) == []


def test_a_structure_that_unpacks_to_too_much_is_refused():
    file = with_document_text("[" + " " * MAX_TEXT + "]")
    assert len(file) < 2**20
    with pytest.raises(ArtifactError, match=f"does not unpack .*larger than {MAX_TEXT} bytes"):
        from_bytes(file)
