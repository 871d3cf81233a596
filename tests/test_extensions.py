"""What other packages add: a format of `graph.emit`, a runtime of `qjax verify`."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.runtimes import RUNTIMES, Runtime, register_runtime
from qjax.support.extensions import EMITTERS, register_emitter

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
    emitters, runtimes = dict(EMITTERS), dict(RUNTIMES)
    yield
    EMITTERS.clear()
    EMITTERS.update(emitters)
    RUNTIMES.clear()
    RUNTIMES.update(runtimes)


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
    with pytest.raises(ValueError, match=r"qjax\.contrib\.rtl writes 'rtl' already"):
        register_emitter("rtl", "another")
    with pytest.raises(ValueError, match="expected a new name, got 'c'"):
        register_runtime("c", Runtime("another", "", "another"))
    assert list(RUNTIMES) == sorted(RUNTIMES)
