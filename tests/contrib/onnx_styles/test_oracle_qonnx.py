"""QONNX's own executor on the files of style "qonnx": every output is the graph's.

python -m pytest --oracles -m oracle tests/contrib/onnx_styles/test_oracle_qonnx.py
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contrib.onnx_styles.qonnx_networks import NETWORKS, WIDTHS, graph_of, inputs

WORKER = """
import sys
import numpy as np
import onnx

# qonnx makes a model of every node, in the newest format of onnx, which the locked ONNX Runtime does not read yet.
onnx.IR_VERSION = 10
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_shapes import InferShapes

model = ModelWrapper(sys.argv[1]).transform(InferShapes())
(output,) = execute_onnx(model, {model.graph.input[0].name: np.load(sys.argv[2])}).values()
np.save(sys.argv[3], output)
"""
"""In a process of its own: it changes settings of onnxruntime."""


def executed(path: Path, x: np.ndarray) -> np.ndarray:
    given, made = path.with_name("x.npy"), path.with_name("y.npy")
    np.save(given, x)
    subprocess.run([sys.executable, "-c", WORKER, str(path), str(given), str(made)], check=True)
    return np.load(made)


@pytest.mark.oracle
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NETWORKS)
def test_qonnx_executes_the_graph(name, width, tmp_path):
    graph, x = graph_of(name, width), inputs(name, 64, 2)
    graph.emit("onnx", tmp_path / "model.onnx", style="qonnx", batch=64)
    np.testing.assert_array_equal(executed(tmp_path / "model.onnx", x), graph(x))
