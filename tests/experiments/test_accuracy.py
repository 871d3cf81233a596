"""Accuracy on real networks: its data, its rows, its tables, and one small run."""

import gzip

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.accuracy import __main__ as command
from experiments.accuracy import data, page
from experiments.accuracy.row import Row, keep, read
from experiments.accuracy.taps import depthwise_by_taps


@pytest.fixture(autouse=True)
def users_promotion():
    """optax mixes dtypes, as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def write_idx(path, array):
    head = b"\0\0\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def test_the_files_of_the_package_areread_idx(tmp_path):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "images.gz", images)
    assert np.array_equal(data.read_idx(tmp_path / "images.gz"), images)
    (tmp_path / "floats.gz").write_bytes(gzip.compress(b"\0\0\x0d\x01\0\0\0\0"))
    with pytest.raises(ValueError, match=r"expected an IDX file of bytes, got one that starts with 00000d01"):
        data.read_idx(tmp_path / "floats.gz")


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Debian's package dataset-fashion-mnist.*put its four \.gz files into"):
        data.fetch(tmp_path / "fashion-mnist")


def test_tables_are_means_and_errors_of_paired_differences(tmp_path):
    rows = [Row("net", "LSQ", "W4A4", seed, 10, 91.0 + seed, 91.5 + seed, 3 + seed, 91.0, 0.1, 60.0) for seed in (0, 1)]
    rows += [Row("net", "PACT", "W4A4", 0, 10, error="ValueError: no")]
    path = tmp_path / "rows.jsonl"
    for row in rows:
        keep(path, row)
    assert read(path) == {row.key: row for row in rows}
    text = page.text(rows)
    assert "| LSQ | 10 | +0.50 ± 0.50 | +1.00 ± 0.50 | 4 | 2 | 60 |" in text
    assert "| PACT | 10 | ValueError: no |" in text
    page.write(tmp_path / "page.md", rows)
    shown = (tmp_path / "page.md").read_text()
    assert "| W4A4 | +1.00 (LSQ) |" in shown
    assert "| LSQ | +1.00 ± 0.50 |" in shown
    assert (tmp_path / "figures/page.png").read_bytes().startswith(b"\x89PNG")


def test_one_seed_is_not_the_answer_beside_several(tmp_path):
    rows = [Row("net", "LSQ", "W4A4", seed, 10, 91.0, 91.5, 0, 91.0) for seed in (0, 1)]
    page.write(tmp_path / "page.md", [*rows, Row("net", "PACT", "W4A4", 0, 10, 91.0, 93.0, 0, 91.0)])
    assert "| W4A4 | +0.50 (LSQ) |" in (tmp_path / "page.md").read_text()


def test_a_short_training_has_its_own_table(tmp_path):
    rows = [
        Row("net", "LSQ", "W4A4", 0, 10, 91.0, 91.5, 0, 91.0),
        Row("net", "PACT", "W4A4", 0, 2, 91.0, 93.0, 0, 91.0),
    ]
    page.write(tmp_path / "page.md", rows)
    shown = (tmp_path / "page.md").read_text()
    assert "| W4A4 | +0.50 (LSQ) |" in shown  # the answer is of the long training
    first, second = shown.split("## Details")[0].split("After 2 epochs.")
    assert "| LSQ | +0.50 |" in first
    assert "PACT" not in first
    assert "| PACT | +2.00 |" in second
    assert "LSQ" not in second


@pytest.mark.parametrize("stride", [1, 2])
def test_a_depthwise_convolution_by_taps_is_xlas(stride):
    rng = np.random.default_rng(0)
    layer = nnx.Conv(3, 3, (3, 3), strides=stride, feature_group_count=3, rngs=nnx.Rngs(0))
    x = jax.numpy.asarray(rng.normal(size=(2, 7, 8, 3)).astype(np.float32))
    expected = layer(x)
    with depthwise_by_taps(layer):
        found = layer(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert layer.conv_general_dilated is jax.lax.conv_general_dilated


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_small_run_and_what_it_keeps(tmp_path, monkeypatch):
    monkeypatch.setitem(command.FLOAT_EPOCHS, "digits", 4)
    given = ["--networks", "MLP on digits", "--methods", "calibration", "LSQ", "LSQ, distilled", "--settings", "W4A4"]
    given += ["--seeds", "1", "--folder", str(tmp_path), "--rows", str(tmp_path / "rows.jsonl")]
    found = command.main(given)
    assert [row.method for row in found] == ["float", "calibration", "LSQ", "LSQ, distilled"]
    assert all(row.error == "" and row.accuracy is not None and row.accuracy > 70 for row in found)
    assert all(row.graph is not None and row.decisions == 0 for row in found[1:])
    assert command.main(given)[1:] == found[1:], "the second run makes none of them anew"
