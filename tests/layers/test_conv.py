"""Convolutions in one, two and three dimensions, and batch normalization behind them."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalSubscript=false

import numpy as np
import pytest
from flax import nnx

from tests.layers.round_trip import check, data


def conv(channels, features, window, **kwargs):
    return nnx.Conv(channels, features, window, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: conv(2, 3, (3,), padding="CAUSAL"), (2, 5, 2)),
        (lambda: conv(2, 3, (3,), padding="CIRCULAR", kernel_dilation=2), (2, 7, 2)),
        (lambda: conv(2, 3, (3, 3), strides=2, padding="SAME"), (2, 6, 5, 2)),
        (lambda: conv(2, 3, (3, 2), padding="VALID", kernel_dilation=(1, 2), use_bias=False), (2, 6, 5, 2)),
        (lambda: conv(9, 4, (2, 2), padding=((0, 1), (1, 0))), (2, 4, 4, 9)),
        (lambda: conv(4, 6, (3, 3), feature_group_count=2), (2, 4, 4, 4)),
        (lambda: conv(4, 8, (3, 3), feature_group_count=4, strides=2), (2, 5, 5, 4)),
        (lambda: conv(2, 3, (2, 2, 2)), (2, 3, 3, 3, 2)),
    ],
    ids=["1d-causal", "1d-circular", "2d-stride", "2d-valid", "2d-wide", "groups", "depthwise", "3d"],
)
def test_conv(make, shape):
    layer = make()
    qmodel, graph = check(layer, data(*shape))
    assert qmodel.qparams()["kernel"].scale.size == layer.out_features
    assert [node.op for node in graph.ir.nodes].count("conv") == 1


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.exhaustive
def test_transposed_conv(padding):
    layer = nnx.ConvTranspose(2, 3, (3, 3), strides=(2, 2), padding=padding, rngs=nnx.Rngs(0))
    check(layer, data(2, 4, 4, 2))


class Normalized(nnx.Module):
    """conv -> batch norm -> relu, with a gamma of every sign."""

    def __init__(self, *, use_scale=True, use_bias=True):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
        self.bn = nnx.BatchNorm(4, momentum=0.9, use_scale=use_scale, use_bias=use_bias, rngs=nnx.Rngs(0))
        if use_scale:
            self.bn.scale[...] = np.asarray([1.5, -0.7, 0.0, 1e-3], np.float32)
        if use_bias:
            self.bn.bias[...] = np.asarray([0.1, 0.5, 0.3, -0.2], np.float32)

    def __call__(self, x):
        return nnx.relu(self.bn(self.conv(x)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("affine", [True, False], ids=["gamma of every sign", "no scale, no bias"])
def test_batch_norm_folds_into_the_convolution(affine):
    qmodel, graph = check(Normalized(use_scale=affine, use_bias=affine), data(4, 4, 4, 2), steps=2)
    assert [node.op for node in graph.ir.nodes] == ["conv"]
    assert set(qmodel.qparams()) == {"input", "conv/kernel", "conv"}


class AfterAddition(nnx.Module):
    def __init__(self):
        self.a = nnx.Conv(2, 3, (1, 1), rngs=nnx.Rngs(0))
        self.b = nnx.Conv(2, 3, (1, 1), rngs=nnx.Rngs(1))
        self.bn = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.bn.scale[...] = np.asarray([1.5, -0.7, 0.0], np.float32)
        self.bn.mean[...] = np.asarray([0.1, -0.2, 0.3], np.float32)

    def __call__(self, x):
        return nnx.relu(self.bn(self.a(x) + self.b(x)))


@pytest.mark.exhaustive
def test_batch_norm_behind_an_addition():
    _, graph = check(AfterAddition(), data(2, 3, 3, 2), steps=2)
    assert [node.op for node in graph.ir.nodes] == ["conv", "conv", "add"]


class First(nnx.Module):
    def __init__(self):
        self.bn = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.bn.scale[...] = np.asarray([1.5, -0.7, 0.0], np.float32)
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(nnx.relu(self.bn(x)))


@pytest.mark.exhaustive
def test_batch_norm_that_stands_alone():
    _, graph = check(First(), data(8, 3), steps=2)
    assert [node.op for node in graph.ir.nodes] == ["rescale", "dot"]
