"""hls4ml on files of style "qonnx": the C++ that it writes, compiled with g++, gives the graph's outputs.

python -m pytest --oracles -m oracle tests/contrib/onnx_styles/test_oracle_hls4ml.py
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.contrib.onnx_styles.qonnx_networks import WIDTHS, Rows

WORKER = """
import sys
import hls4ml
import numpy as np
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
from qonnx.transformation.gemm_to_matmul import GemmToMatMul
from qonnx.util.cleanup import cleanup_model

source, given, made, folder, images = sys.argv[1:]
model = cleanup_model(ModelWrapper(source))
if images == "images":
    model = cleanup_model(model.transform(ConvertToChannelsLastAndClean()).transform(GemmToMatMul()))
# Wide enough for every sum and every bias. The types of Quant nodes come from the file.
known = hls4ml.utils.config.config_from_onnx_model(
    model, granularity="name", backend="Vitis", default_precision="fixed<48,20>"
)
layers = hls4ml.converters.convert_from_onnx_model(
    model, output_dir=folder, io_type="io_parallel", backend="Vitis", hls_config=known
)
layers.compile()
np.save(made, layers.predict(np.load(given)))
"""


class Images(nnx.Module):
    """Convolutions, a pooling, a dense layer. hls4ml takes a global average for one over other axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), bias_init=nnx.initializers.normal(0.3), rngs=rngs)
        self.second = nnx.Conv(8, 8, (3, 3), padding="VALID", rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.second(nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))))


NETWORKS = {"rows": (Rows, (16,), 512), "images": (Images, (8, 8, 3), 256)}


@pytest.mark.oracle
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NETWORKS)
def test_hls4ml_simulates_the_graph(name, width, tmp_path):
    """With one scale per kernel: hls4ml 1.3.0 does not take scales per channel that are constants of Quant."""
    kind, shape, count = NETWORKS[name]
    weights, activations = (qjax.QSpec(bits=bits) for bits in WIDTHS[width])
    recipe = qjax.Recipe("fpga", weights, activations, method="tqt", weight_method="tqt")
    sample, x = (np.asarray(jax.random.normal(jax.random.key(k), (count, *shape))) for k in range(2))
    qmodel = qjax.quantize(kind(nnx.Rngs(0)), recipe, sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample[:2])
    graph.emit("onnx", tmp_path / "model.onnx", style="qonnx", batch=count)
    np.save(tmp_path / "x.npy", x)
    files = (str(tmp_path / part) for part in ("model.onnx", "x.npy", "y.npy", "project"))
    subprocess.run([sys.executable, "-c", WORKER, *files, name], check=True, stdout=subprocess.DEVNULL)
    expected = np.asarray(graph(x))
    assert len(np.unique(expected)) > 5
    np.testing.assert_array_equal(np.load(Path(tmp_path) / "y.npy").reshape(expected.shape), expected)
