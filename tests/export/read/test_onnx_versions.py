"""Files that earlier versions of the emitter wrote are read: as the same graph, whose codes are the file's."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from qjax.export.emit.onnx import to_model
from qjax.export.emit.onnx.integer import VERSION
from qjax.export.read import read
from qjax.run.interpreter import Interpreter

FILES = Path(__file__).parent / "files"


@pytest.mark.parametrize("style", ["integer", "qdq", "qoperator"])
def test_a_file_of_version_1(style, tmp_path):
    path = FILES / f"version1_{style}.onnx"
    graph = read(path)
    again = to_model(graph, style=style)
    facts = {entry.key: entry.value for entry in again.metadata_props}
    assert json.loads(facts["qjax"])["version"] == VERSION
    # both files, and the graph, are one function; codes are fed to all three
    codes = np.random.default_rng(0).integers(-128, 128, (3, 4, 4, 2), dtype=np.int8)
    (want,) = Interpreter(graph)(codes)
    newer = tmp_path / "model.onnx"
    newer.write_bytes(to_model(graph, style=style, codes=style != "integer").SerializeToString())
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    (name,) = graph.inputs
    for file in (path, newer):
        model = onnx.load(file)
        if model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            continue
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        assert np.array_equal(session.run(None, {name: codes})[0], np.asarray(want))
    # the old file holds a folder of the machine that wrote it
    texts = [re.sub(r"location='[^']*/", "location='", str(each)) for each in (read(newer), graph)]
    assert texts[0] == texts[1]


def test_a_changed_file_of_version_1_is_refused(tmp_path):
    model = onnx.load(FILES / "version1_integer.onnx")
    function = model.functions[0]
    function.node[-1].op_type = "Identity"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="something changed the file"):
        read(path)
