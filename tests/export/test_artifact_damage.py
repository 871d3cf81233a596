"""Artifacts from a damaged disk, and random bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.export.artifact import ArtifactError, from_bytes
from tests.export.graphs import differences
from tests.export.sealed import FILE, SMALL, START, build, parts, seal


def test_the_tests_own_writer_agrees():
    for file in (FILE, SMALL):
        assert differences(from_bytes(file), from_bytes(build(*parts(file)))) == []


def test_every_truncation():
    for size in range(len(FILE)):
        with pytest.raises(ArtifactError):
            from_bytes(FILE[:size])
    with pytest.raises(ArtifactError, match=f"expected {len(FILE)} bytes, got 1000: cut short; copy or download"):
        from_bytes(FILE[:1000])
    with pytest.raises(ArtifactError, match=f"expected {len(FILE)} bytes, got {len(FILE) + 1}: too long"):
        from_bytes(FILE + b"\x00")


def test_every_flipped_bit():
    for place in range(len(SMALL)):
        for bit in range(8):
            damaged = bytearray(SMALL)
            damaged[place] ^= 1 << bit
            with pytest.raises(ArtifactError):
                from_bytes(bytes(damaged))


def test_a_flipped_bit_is_named():
    damaged = bytearray(FILE)
    damaged[-5] ^= 4
    digest = FILE[len(START) + 8 :][:64].decode()
    with pytest.raises(ArtifactError, match=f"SHA-256 {digest}, got [0-9a-f]{{64}}: the file is damaged; copy"):
        from_bytes(bytes(damaged))


@given(st.binary(max_size=300), st.sampled_from(["alone", "after length", "after start"]))
def test_random_bytes(noise, where):
    prefix = {"alone": b"", "after length": bytes(8), "after start": bytes(8) + START.encode()}[where]
    with pytest.raises(ArtifactError):
        from_bytes(prefix + noise)


def test_versions():
    document = json.dumps(json.dumps(parts(SMALL)[0])) + "}}"
    for version in ("0", "3", "5"):
        message = f"expected format version 4, got {version}: convert the model again with this version of qjax"
        with pytest.raises(ArtifactError, match=message):
            from_bytes(seal(document, b"", version=version))
    for version in ("01", "-1", "1.0", "", "1" * 10):
        with pytest.raises(ArtifactError, match="expected the fields sha256, bytes, version and graph"):
            from_bytes(seal(document, b"", version=version))
