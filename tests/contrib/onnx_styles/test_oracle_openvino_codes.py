"""OpenVINO's CPU plugin on whole networks: its codes are the graph's, on every set of instructions it may use.

python -m pytest --oracles -m oracle tests/contrib/onnx_styles/test_oracle_openvino_codes.py
"""

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qjax
from conformance.runtimes import openvino
from conformance.runtimes.process import Process
from qjax.export.emit.onnx import to_model
from tests.contrib.onnx_styles.openvino_networks import NETWORKS, exact_here, graph_of, images, narrowed

WEIGHTED = ("Convolution", "FullyConnected")
_WORKER = Path(openvino.__file__).with_name("openvino_worker.py")


@functools.cache
def process(instructions: str) -> Process:
    """instructions: what ONEDNN_MAX_CPU_ISA allows; all that the CPU has where it is empty."""
    allowed = {"ONEDNN_MAX_CPU_ISA": instructions} if instructions else {}
    return Process("OpenVINO", [sys.executable], _WORKER, ModuleNotFoundError, allowed)


def answer(graph: Any, x: np.ndarray, instructions: str = "", **options: Any) -> dict[str, Any]:
    model = to_model(graph, **options).SerializeToString()
    return process(instructions).ask({"model": model, "inputs": [x]}, "a network")


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETWORKS)
def test_every_code(name, seed):
    """Of the file with floats at its ends, of the one with codes, with a free batch and a fixed one; and `exact`."""
    qmodel, graph = graph_of(name, seed)
    x = images(64, seed + 10)
    assert np.array_equal(qjax.exact(qmodel, images(2, seed))(qmodel, x), graph(x))
    graph = exact_here(graph)
    expected = np.asarray(graph(x))
    codes = np.asarray(graph.quantize(x))
    for batch in (None, 64):
        found = answer(graph.ir, x, batch=batch)
        np.testing.assert_array_equal(found["outputs"][0], expected)
        products = [precision for layer, precision in found["layers"] if layer in WEIGHTED]
        assert len(products) >= 4
        # an average pooling is a convolution with ones, in floats
        assert products.count("f32") == (name == "residual")
        assert set(products) <= {"u8", "i8", "f32"}
        (output,) = answer(graph.ir, codes, batch=batch, codes=True)["outputs"]
        np.testing.assert_array_equal(output, graph.run(codes))


@pytest.mark.oracle
@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"])
@pytest.mark.parametrize("name", NETWORKS)
def test_instructions_do_not_decide(name, instructions):
    """With weights of 7 bits."""
    x, narrow = images(64, 20), narrowed(graph_of(name)[1]).ir
    (output,) = answer(narrow, x, instructions)["outputs"]
    (expected,) = answer(narrow, x)["outputs"]
    np.testing.assert_array_equal(output, expected)
