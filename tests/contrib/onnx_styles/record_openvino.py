"""Records OpenVINO's codes on `openvino_networks`: python -m tests.contrib.onnx_styles.record_openvino."""

import numpy as np

from conformance.runtimes.openvino import Openvino, answer
from tests.contrib.onnx_styles.openvino_networks import NETWORKS, graph_of, images
from tests.contrib.onnx_styles.test_onnx_openvino import FOLDER


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in NETWORKS:
        _, graph = graph_of(name)
        inputs = np.asarray(graph.quantize(images(16, 10)))
        (outputs,) = answer(graph.ir, [inputs], codes=True)["outputs"]
        graph.save(FOLDER / f"{name}.qjax")
        np.savez_compressed(FOLDER / f"{name}.npz", inputs=inputs, outputs=outputs)
        print(name, outputs.shape, Openvino().version())


if __name__ == "__main__":
    main()
