"""The emitted function, reloaded in a process that cannot import qjax, gives the interpreter's codes."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

import qjax
from qjax import targets
from qjax.export.emit import stablehlo
from tests.layers.round_trip import data
from tests.targets.test_every_target import Network, recipe_of

RELOAD = """
import sys
sys.modules["qjax"] = sys.modules["flax"] = None
import jax, numpy as np
model, codes, out = sys.argv[1:]
exported = jax.export.deserialize(open(model, "rb").read())
np.savez(out, *[exported.call(x) for x in np.load(codes).values()])
"""


def graph_of(name, network=Network):
    x = data(4, 6, 6, 2)
    qmodel = qjax.quantize(network(normalized=name != "fpga"), recipe_of(name), x)
    qmodel.eval()
    return qjax.convert(qmodel, x)


@pytest.fixture(scope="module")
def graph():
    return graph_of("tflite_optimized_arm")


@pytest.mark.sampled(1)
def test_a_fresh_process_without_qjax(graph, tmp_path):
    batches = [np.asarray(graph.quantize(data(n, 6, 6, 2, seed=n) * 2)) for n in (1, 2, 7)]
    graph.emit("stablehlo", tmp_path / "model.stablehlo")
    np.savez(tmp_path / "codes.npz", *batches)
    files = [str(tmp_path / name) for name in ("model.stablehlo", "codes.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", RELOAD, *files], check=True, cwd=tmp_path)
    for codes, got in zip(batches, np.load(tmp_path / "out.npz").values(), strict=True):
        np.testing.assert_array_equal(got, graph.run(codes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in targets.names() if name != "fpga"])
def test_every_target_lowers_with_a_free_batch(name, graph):
    """Lowering only: what the function computes is the interpreter's own program."""
    exported = export.deserialize(bytearray(stablehlo.to_bytes(graph.retarget(name).ir)))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert [str(aval) for aval in exported.in_avals] == ["int8[batch,6,6,2]"]
    # numbers of a floating type occur nowhere
    assert not re.search(r"x(f16|f32|f64|bf16)>|tensor<(f16|f32|f64|bf16)>", exported.mlir_module())


@pytest.mark.exhaustive
def test_a_fixed_batch_and_one_platform(graph):
    exported = export.deserialize(bytearray(stablehlo.to_bytes(graph.ir, batch=3, platforms=["cpu"])))
    codes = graph.quantize(data(3, 6, 6, 2))
    np.testing.assert_array_equal(exported.call(codes), graph.run(codes))
    assert [str(aval) for aval in exported.in_avals] == ["int8[3,6,6,2]"]


def test_reals(graph):
    x = data(5, 6, 6, 2)
    exported = export.deserialize(bytearray(stablehlo.to_bytes(graph.ir, reals=True, platforms=["cpu"])))
    np.testing.assert_array_equal(jax.jit(exported.call)(x), graph(x))


def test_wrong_options(graph):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        stablehlo.to_bytes(graph.ir, batch=0)
    with pytest.raises(ValueError, match="formats c, onnx, pte, rtl, stablehlo, tflite, got 'coreml'"):
        graph.emit("coreml", "x")


@pytest.mark.exhaustive
def test_a_softmax_with_a_free_batch_and_no_path_of_this_machine():
    x = data(4, 6)
    qmodel = qjax.quantize(
        qjax.from_function(lambda w, x: jax.nn.softmax(x @ w), x.T), qjax.Recipe(target="tflite_micro"), x
    )
    graph = qjax.convert(qmodel, x)
    written = stablehlo.to_bytes(graph.ir)
    assert b"test_stablehlo" not in written
    assert b"/qjax/" not in written
    codes = graph.quantize(x)
    np.testing.assert_array_equal(export.deserialize(bytearray(written)).call(codes), graph.run(codes))
