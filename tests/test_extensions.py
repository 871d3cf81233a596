"""What other packages add: a format of `graph.emit`, a runtime of `qjax verify`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx

import qjax
from qjax.runtimes import RUNTIMES, Runtime, register_runtime
from qjax.support.extensions import (
    EMITTERS,
    ONNX_STYLES,
    STYLE_OF_TARGET,
    VECTORS,
    find_name,
    register_emitter,
    register_names,
    register_profiles,
    register_style,
    register_vectors,
)

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


@pytest.fixture(scope="module")
def graph() -> qjax.IntegerGraph:
    return qjax.convert(qjax.quantize(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), qjax.Recipe(), X), X)


MODULE = '''
from qjax.export.integer_graph import IntegerGraph


def emit(graph, path, *, suffix=""):
    with open(path, "w") as file:
        file.write(" ".join(node.op for node in graph.nodes) + suffix)


def prepare(graph, folder, batch, mode, options):
    """A runtime that is off by one code."""
    return lambda codes: [graph.run(*codes) + 1]
'''


@pytest.fixture
def registries() -> Iterator[None]:
    registries: list[dict[Any, Any]] = [EMITTERS, RUNTIMES, ONNX_STYLES, STYLE_OF_TARGET, VECTORS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("registries")
def test_a_format_and_a_runtime_of_ones_own(
    graph: qjax.IntegerGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    register_emitter("own", "own_package")
    register_runtime("own", Runtime("own_package", "", "a runtime that is off by one"))
    graph.emit("own", tmp_path / "model.own", suffix="!")
    assert (tmp_path / "model.own").read_text() == "dot!"
    with pytest.raises(TypeError, match="suffix"):
        graph.emit("own", tmp_path / "model.own", sufix="?")
    qmodel = qjax.quantize(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), qjax.Recipe(), X)
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X], runtimes=["own"])
    assert not report.exact


def test_a_name_belongs_to_one() -> None:
    register_emitter("rtl", "qjax.contrib.rtl")
    with pytest.raises(ValueError, match=r"qjax\.contrib\.rtl has 'rtl' already"):
        register_emitter("rtl", "another")
    with pytest.raises(ValueError, match=r"qjax\.contrib\.onnx_styles\.qonnx has 'qonnx' already"):
        register_style("qonnx", "another")
    with pytest.raises(ValueError, match=r"openvino has 'openvino_cpu' already"):
        register_style("integer", "qjax.export.emit.onnx.integer", "openvino_cpu")
    with pytest.raises(ValueError, match=r"qjax\.contrib\.simd has 'cortex_m' already"):
        register_vectors("cortex_m", "another")
    with pytest.raises(ValueError, match=r"qjax\.contrib\.profiles\.requests has 'profiles' already"):
        register_profiles("another")
    with pytest.raises(ValueError, match="expected a new name, got 'c'"):
        register_runtime("c", Runtime("another", "", "another"))
    assert list(RUNTIMES) == sorted(RUNTIMES)


STYLE = """
from qjax.export.emit.onnx import integer


def to_model(graph, *, batch, codes, vnni):
    model = integer.to_model(graph, batch=batch, vnni=vnni)
    model.producer_name = "own"
    return model
"""


@pytest.mark.usefixtures("registries")
def test_a_style_of_ones_own(graph: qjax.IntegerGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_style.py").write_text(STYLE)
    monkeypatch.syspath_prepend(tmp_path)
    register_style("own", "own_style", "nearest_even")
    assert graph.target == "nearest_even"
    graph.emit("onnx", tmp_path / "own.onnx")
    assert onnx.load(tmp_path / "own.onnx").producer_name == "own"
    with pytest.raises(ValueError, match=r"expected one of the styles integer, .*, own, got 'mine'"):
        graph.emit("onnx", tmp_path / "own.onnx", style="mine")


def test_names_of_a_package() -> None:
    register_names("qjax.training", "qjax.contrib.learned_bits")
    assert find_name("qjax.training", "ebops") is qjax.training.ebops
    for name in ("nothing", "_private"):
        with pytest.raises(AttributeError, match=f"module 'qjax.training' has no attribute '{name}'"):
            getattr(qjax.training, name)
