"""Records what qonnx computes on the networks of `qonnx_networks`: python -m tests.contrib.onnx_styles.record_qonnx."""

import tempfile
from pathlib import Path

import numpy as np

from tests.contrib.onnx_styles.qonnx_networks import NETWORKS, WIDTHS, graph_of, inputs
from tests.contrib.onnx_styles.test_onnx_qonnx import FOLDER
from tests.contrib.onnx_styles.test_oracle_qonnx import executed


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in NETWORKS:
        for width in WIDTHS:
            graph, x = graph_of(name, width), inputs(name, 16, 1)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                graph.emit("onnx", path, style="qonnx", batch=len(x))
                outputs = executed(path, x)
            graph.save(FOLDER / f"{name}_{width}.qjax")
            np.savez_compressed(FOLDER / f"{name}_{width}.npz", inputs=x, outputs=outputs)
            print(name, width, outputs.shape)


if __name__ == "__main__":
    main()
