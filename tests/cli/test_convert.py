"""`qjax emit`, `qjax read`, `qjax targets`."""

import inspect

import numpy as np
import pytest

from qjax import load, targets
from qjax.cli.emit import OPTIONS
from qjax.contrib import executorch as pte
from qjax.export.emit import c, onnx, stablehlo, tflite
from qjax.support.extensions import EMITTERS
from tests.export.graphs import assert_equal


def test_the_command_knows_every_format_and_option():
    assert set(OPTIONS) == set(EMITTERS)
    functions = {
        "c": c.emit,
        "onnx": onnx.emit,
        "pte": pte.emit,
        "stablehlo": stablehlo.to_bytes,
        "tflite": tflite.emit,
    }
    for name, function in functions.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        # which platforms a function is lowered for stays a matter of the library
        assert set(OPTIONS[name]) == set(keywords) - {"platforms"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["onnx", "stablehlo", "tflite"])
def test_files(qjax, graphs, folder, name):
    said = qjax("emit", "dense.qjax", name, "-o", f"model.{name}", "--batch", 2).stdout.splitlines()
    path = folder / f"model.{name}"
    graphs["dense"].emit(name, folder / "again", batch=2)
    if name != "stablehlo":  # it records where in the program it was lowered
        assert path.read_bytes() == (folder / "again").read_bytes()
    assert said == [f"model.{name}: {name}, target tflite_micro", f"  model.{name}: {path.stat().st_size:,} bytes"]


def test_c_is_a_folder(qjax, folder):
    said = qjax("emit", "dense.qjax", "c", "-o", "firmware", "--name", "net", "--vectors", 1).stdout
    assert "arena of" in said
    for file in ("net.c", "net.h", "net_test.c", "Makefile"):
        assert f"  {file}: {(folder / 'firmware' / file).stat().st_size:,} bytes\n" in said


@pytest.mark.parametrize(("option", "call"), [("--simd", "sums16_add"), ("--cortex-m", "qjax_sums1")])
def test_c_with_vectors(qjax, folder, option, call):
    qjax("emit", "dense.qjax", "c", "-o", f"firmware{option}", option)
    assert call in (folder / f"firmware{option}" / "model.c").read_text()


def test_another_target(qjax, folder):
    said = qjax("emit", "dense.qjax", "tflite", "-o", "micro.tflite", "--target", "tflite_reference").stdout
    assert said.startswith("micro.tflite: tflite, target tflite_reference\n")


def test_emitting_is_refused(refused, folder):
    assert "'onx' is not one of" in refused("emit", "dense.qjax", "onx", "-o", "x")
    message = refused("emit", "dense.qjax", "tflite", "-o", "x.tflite", "--style", "qdq")
    assert message == "--style is not an option of the format tflite, which supports --batch, --int4."
    assert "expected one of the styles" in refused("emit", "dense.qjax", "onnx", "-o", "x.onnx", "--style", "none")
    assert "nearest_even" in refused("emit", "dense.qjax", "tflite", "-o", "x.tflite", "--target", "nearest_even")
    assert "create it first" in refused("emit", "dense.qjax", "onnx", "-o", "none/x.onnx")
    assert not (folder / "x.tflite").exists()


@pytest.mark.parametrize("name", ["onnx", "tflite"])
def test_reading_back(qjax, graphs, folder, name):
    """And every command takes the other formats too."""
    qjax("emit", "dense.qjax", name, "-o", f"read.{name}")
    said = qjax("read", f"read.{name}", "-o", "read.qjax").stdout
    assert said.startswith("read.qjax: target tflite_micro, 1 nodes\n  input  x: int8 batchx5")
    assert said.endswith(f"read.qjax: {(folder / 'read.qjax').stat().st_size:,} bytes written\n")
    assert_equal(load(folder / "read.qjax").ir, graphs["dense"].ir)
    x = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)
    np.save(folder / "x.npy", x)
    qjax("run", f"read.{name}", "x.npy", "-o", "y.npy")
    np.testing.assert_array_equal(np.load(folder / "y.npy"), graphs["dense"](x))


def test_reading_under_another_target(qjax, graphs, folder):
    qjax("read", "dense.qjax", "-o", "other.qjax", "--target", "tosa")
    assert_equal(load(folder / "other.qjax").ir, graphs["dense"].retarget("tosa").ir)


def test_reading_is_refused(refused, folder):
    (folder / "noise.onnx").write_bytes(bytes(range(256)))
    assert "noise.onnx" in refused("read", "noise.onnx", "-o", "x.qjax")
    assert "create it first" in refused("read", "dense.qjax", "-o", "none/x.qjax")


def test_targets(qjax):
    listed = qjax("targets").stdout.splitlines()[2:]
    assert [line.split()[0] for line in listed] == list(targets.names())
    one = qjax("targets", "tflite_optimized_x86").stdout
    assert one.startswith(f"tflite_optimized_x86: {targets.get('tflite_optimized_x86').description}\n")
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in one.splitlines()[3:]}
    assert shown["add"] == "tflite_add_neon"
    assert shown["dot"] == "neon, scale in float32"
