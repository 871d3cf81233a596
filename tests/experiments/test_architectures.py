"""Architectures in little: integers only, and the exact forward is the graph, bit for bit.

Three of them; `make architectures` runs all, trains them as well, and compares node by node.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from experiments import architectures
from experiments.architectures import ARCHITECTURES, Row


@pytest.fixture(autouse=True)
def users_promotion():
    """The models are written as users write them, under JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def built(name: str) -> tuple[nnx.Module, Any]:
    """The small model and its sample, made in one compiled function: a third of the time of `architectures.build`."""
    module, variant = ARCHITECTURES[name]
    if module.startswith("linen"):
        return architectures.build(name)
    small = getattr(importlib.import_module(f"experiments.models.{module}"), f"small_{variant}" if variant else "small")
    key = jax.random.key(0, impl="unsafe_rbg")
    return nnx.jit(lambda key: small(nnx.Rngs(key)))(key)


@pytest.mark.parametrize("name", ["Autoencoder", "MobileNet V1", "GRU"])
@pytest.mark.exhaustive
def test_becomes_integers_and_the_exact_forward_is_the_graph(name: str) -> None:
    model, sample = built(name)
    qmodel = qjax.quantize(model, qjax.Recipe(), sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    dtypes = {graph.ir.tensors[tensor].dtype for node in graph.ir.nodes for tensor in (*node.inputs, node.output)}
    assert dtypes <= {"int8", "int16", "int32", "bool", "uint8"}, dtypes
    (batch,) = architectures.batches(sample, 1)
    args = architectures.arguments(batch)
    outputs = graph(*args)
    assert all(bool(jnp.isfinite(y).all()) for y in jax.tree.leaves(outputs))
    exact = nnx.jit(qjax.exact(qmodel, sample))(qmodel, *args)
    assert architectures.differing(exact, outputs)[0] == 0


@pytest.mark.exhaustive
def test_the_row_of_one_architecture() -> None:
    row = architectures.run("Autoencoder", steps=1, count=1)
    assert row.error == ""
    assert (row.nodes, row.float_nodes, row.exact_mismatches) == (4, 0, 0)
    assert len(row.losses) == 1
    assert np.isfinite(row.losses[0])
    assert row.outputs == 24
    assert row.compared >= row.outputs
    assert "layers/layers/9" in row.report


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_a_failure_is_told_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Products(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.cumlogsumexp(x, axis=1)

    monkeypatch.setattr(architectures, "build", lambda name, full: (Products(), jnp.ones((2, 8))))
    row = architectures.run("ResNet-20")
    assert "Error: " in row.error
    assert row.nodes == 0
    text = architectures.page([row], architectures.parser().parse_args([]))
    assert f"- **ResNet-20**, {row.error}" in text


def test_the_page_has_a_line_per_architecture() -> None:
    rows = [Row(name, nodes=3, compared=1234) for name in ARCHITECTURES]
    text = architectures.page(rows, architectures.parser().parse_args(["--steps", "5", "--target", "tflite_micro"]))
    assert text.count("1,234") == len(ARCHITECTURES)
    assert 'target="tflite_micro"' in text
    assert "What fails" not in text
    assert "Not run" not in text
    assert "Not run here: GRU, ViT." in architectures.page(rows, architectures.parser().parse_args([]), ["GRU", "ViT"])


def test_rows_are_kept_and_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Row("GRU", nodes=3, compared=1234)
    architectures.write(architectures.row_file("GRU", tmp_path), json.dumps(dataclasses.asdict(kept)))
    made = tmp_path / "page.md"
    assert architectures.main(["--only", "GRU", "--rows", str(tmp_path), "--page", str(made)]) == [kept]
    assert "| GRU |" in made.read_text()
    assert "1,234" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_batches_keep_masks_and_ranges() -> None:
    sample = {"mask": jnp.asarray([[1, 0], [1, 1]]), "tokens": jnp.asarray([[3, 9]] * 2), "x": jnp.zeros((2, 2))}
    for batch in architectures.batches(sample, 3):
        assert sorted(batch["mask"].tolist()) == [[1, 0], [1, 1]]
        assert batch["tokens"].min() >= 3
        assert batch["tokens"].max() <= 9
        assert len(np.unique(batch["x"])) == 4


def test_equations_are_counted_inside_calls() -> None:
    class Twice(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.jit(jnp.sin)(jax.nn.relu(x)) + 1

    assert architectures.equations(Twice(), jnp.ones(3)) == 3


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        architectures.main(["--only", "ResNet-7"])
    assert "ResNet-20" in capsys.readouterr().err
