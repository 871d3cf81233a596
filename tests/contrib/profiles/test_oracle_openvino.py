"""OpenVINO on the files of the profile `openvino_cpu`: kernels of 8 bits in its execution graph, and its codes.

python -m pytest --oracles -m oracle tests/contrib/profiles/test_oracle_openvino.py
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import qjax
from qjax import Recipe
from tests.contrib.onnx_styles.openvino_networks import exact_here
from tests.contrib.profiles.networks import IMAGES, Chain, Residual

WEIGHTED = ("Convolution", "FullyConnected")


WORKER = """
import json, sys
import numpy as np
import openvino

core = openvino.Core()
settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
model = core.compile_model(core.read_model(sys.argv[1]), "CPU", settings)
(output,) = model([np.load(sys.argv[2])]).values()
np.save(sys.argv[3], output)
facts = [node.get_rt_info() for node in model.get_runtime_model().get_ordered_ops()]
print(json.dumps([[fact["layerType"].astype(str), fact["runtimePrecision"].astype(str)] for fact in facts]))
"""
"""In a process of its own: the package forks when it is imported, which JAX's threads do not survive."""


def run(path: Path, x: np.ndarray) -> tuple[np.ndarray, Counter[tuple[str, str]]]:
    """The output, and (layer, precision) of its products with weights."""
    given, made = path.with_name("x.npy"), path.with_name("y.npy")
    np.save(given, x)
    command = [sys.executable, "-c", WORKER, str(path), str(given), str(made)]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    known = [tuple(entry) for entry in json.loads(text.strip().splitlines()[-1])]
    return np.load(made), Counter((layer, precision) for layer, precision in known if layer in WEIGHTED)


@pytest.mark.oracle
@pytest.mark.parametrize("profile", ["openvino_cpu", "tensorrt", "qnn_htp"])
def test_products_run_on_kernels_of_eight_bits(profile, tmp_path):
    """And every code is that of the graph."""
    output, expected, products = answered(Chain(), profile, tmp_path)
    assert sum(products.values()) == 2
    assert all(precision in ("i8", "u8") for _, precision in products), products
    assert np.array_equal(output, expected)


@pytest.mark.oracle
def test_a_sum_behind_a_convolution_is_fused(tmp_path):
    """OpenVINO adds the other side in floats, without the rounding that the file states in front of the sum."""
    output, expected, products = answered(Residual(), "openvino_cpu", tmp_path)
    assert products["Convolution", "i8"] + products["Convolution", "u8"] == 2
    steps = np.abs(output - expected) / np.min(np.diff(np.unique(expected)))
    print(f"{int(np.sum(output != expected))} of {output.size} codes differ, by at most {steps.max():.0f}")
    assert not np.array_equal(output, expected)
    assert steps.max() < 1.5


def answered(model: Any, profile: str, folder: Path) -> tuple[np.ndarray, np.ndarray, Counter[tuple[str, str]]]:
    """OpenVINO's output, the graph's, and the products."""
    graph = exact_here(qjax.convert(qjax.quantize(model, Recipe(profile=profile), IMAGES), IMAGES))
    x = np.asarray(jax.random.normal(jax.random.key(2), (64, 8, 8, 3)))
    graph.emit("onnx", folder / "model.onnx", batch=64)
    output, products = run(folder / "model.onnx", x)
    return output, np.asarray(graph(x)), products


@pytest.mark.oracle
def test_a_file_for_onnx_runtime_runs_in_floats(tmp_path):
    """Why there are portable files: beside uint8 activations, style "qdq" stores uint8 weights."""
    recipe = Recipe(target="onnxruntime", activations=qjax.QSpec(bits=8, signed=False, symmetric=False))
    graph = qjax.convert(qjax.quantize(Chain(), recipe, IMAGES), IMAGES)
    graph.emit("onnx", tmp_path / "model.onnx", style="qdq", batch=2)
    _, products = run(tmp_path / "model.onnx", np.asarray(IMAGES))
    assert products["Convolution", "f32"] == 1
