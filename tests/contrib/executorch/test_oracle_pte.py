"""Whole networks as .pte files, run by ExecuTorch: no code differs from the graph's."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.contrib.profiles.networks import IMAGES, Chain, Residual

pytestmark = [
    pytest.mark.oracle,
    # of torch, executorch and what they import
    pytest.mark.filterwarnings("ignore"),
]


class Mobile(nnx.Module):
    """A stem of stride 2, an inverted residual block with clamps at 6, a mean and a dense layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, padding=((1, 1), (1, 1)), rngs=rngs)
        self.expand = nnx.Conv(8, 24, (1, 1), rngs=rngs)
        self.depthwise = nnx.Conv(24, 24, (3, 3), feature_group_count=24, rngs=rngs)
        self.project = nnx.Conv(24, 8, (1, 1), rngs=rngs)
        self.dense = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu6(self.stem(x))
        h = nnx.relu6(self.depthwise(nnx.relu6(self.expand(x))))
        return self.dense((x + self.project(h)).mean((1, 2)))


class Gated(nnx.Module):
    """Rows: two dense layers, their product, a concatenation."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b, self.c = (nnx.Linear(12, 16, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(32, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        gated = self.a(x) * nnx.relu(self.b(x))
        return self.out(jnp.concatenate([gated, gated], -1))


class Applied(nnx.Module):
    """A function as a model."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


NETWORKS = {
    "chain": (Chain, (8, 8, 3)),
    "residual": (Residual, (8, 8, 3)),
    "mobile": (Mobile, (16, 16, 3)),
    "gated": (Gated, (12,)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_codes_of_its_graph(name):
    make, shape = NETWORKS[name]
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(32, *shape)).astype(np.float32) for _ in range(4)]
    qmodel = qjax.quantize(make(), qjax.Recipe(profile="executorch_xnnpack"), batches[0])
    graph = qjax.convert(qmodel, batches[0])
    assert graph.target == "executorch_xnnpack"
    report = qjax.verify(graph, qmodel, batches, runtimes=["executorch"])
    (result,) = report.files
    assert result.equal, str(result)
    assert "no code of" in result.sentence


@pytest.mark.parametrize("axes", [(1,), (3,), (1, 2), (2, 3)])
def test_means_over_all_axes(axes):
    qmodel = qjax.quantize(Applied(lambda x: x.mean(axes)), qjax.Recipe(target="executorch_xnnpack"), IMAGES)
    batches = [np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype(np.float32)]
    assert qjax.verify(qjax.convert(qmodel, IMAGES), qmodel, batches, runtimes=["executorch"]).files[0].equal


def test_a_file_is_written_and_checked(tmp_path):
    qmodel = qjax.quantize(Chain(), qjax.Recipe(profile="executorch_xnnpack"), IMAGES)
    graph = qjax.convert(qmodel, IMAGES)
    graph.emit("pte", tmp_path / "model.pte", batch=2)
    assert (tmp_path / "model.pte").read_bytes()[4:8] == b"ET12"
    with pytest.raises(ValueError, match=r"a \.pte contains scales but no rounding.*'tflite_micro'"):
        graph.retarget("tflite_micro").emit("pte", tmp_path / "other.pte")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (nnx.sigmoid, r"table.* has no form in a module of this runtime"),
        (lambda x: jnp.einsum("bhwc,bvwc->bhvw", x, x), "a product of two activations runs in float32"),
        (lambda x: x[:, ::2], r"Slice has no form in a module"),
    ],
)
def test_what_has_other_codes_is_refused(tmp_path, function, why):
    qmodel = qjax.quantize(Applied(function), qjax.Recipe(target="executorch_xnnpack"), IMAGES)
    graph = qjax.convert(qmodel, IMAGES)
    with pytest.raises(ValueError, match=why):
        graph.emit("pte", tmp_path / "model.pte", batch=2)
