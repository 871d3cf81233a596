"""Node data for Model Explorer: the report's measures under the names of the tensors of the emitted file."""

import json

import numpy as np

import qjax
from tests.reporting.models import data, quantized


def test_every_result_names_a_tensor_of_the_file(tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    graph = qjax.convert(quantized(), data())
    paths = qjax.node_data(graph, [data()], tmp_path / "nodes")
    assert {path.stem for path in paths} >= {"bits", "bytes", "macs", "headroom"}
    graph.emit("tflite", tmp_path / "m.tflite")
    names = {detail["name"] for detail in Interpreter(str(tmp_path / "m.tflite")).get_tensor_details()}
    for path in paths:
        found = json.loads(path.read_text())
        assert set(found) == {"results", "gradient"}
        assert [item["stop"] for item in found["gradient"]] == [0, 1]
        assert set(found["results"]) <= names
        assert all(np.isfinite(result["value"]) for result in found["results"].values())
    macs = json.loads((tmp_path / "nodes" / "macs.json").read_text())["results"]
    assert macs["first"] == {"value": 6 * 8}
