"""Brevitas (torch) from the same float weights: the ResNet and the depthwise CNN, written once more in torch.

What a convolution or the dense layer reads has the setting's bits, as have their weights. The branches of a residual
sum and what batch norm reads stay float. The image, the first and the last layer have 8 bits.
"""

from collections.abc import Callable
from typing import Any

import brevitas.nn as qnn  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from brevitas.core.scaling import ScalingImplType  # pyright: ignore[reportMissingImports]
from brevitas.quant import (  # pyright: ignore[reportMissingImports]
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatMSE,
)
from flax import nnx
from torch import nn  # pyright: ignore[reportMissingImports]

from experiments.accuracy.networks import Depthwise, ResNet
from experiments.accuracy.train import BATCH, steps_of


class LearnedWeightScales(Int8WeightPerChannelFloatMSE):
    """One learned scale for each output channel; it starts where the squared error is least."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS


class _Layer(nn.Module):
    """A convolution padded as XLA's "SAME", and the batch norm behind it if there is one."""

    def __init__(self, conv: nnx.Conv, norm: Any, bits: int, weights: type) -> None:
        super().__init__()
        kernel = np.asarray(conv.kernel[...])  # [height, width, inputs, outputs]
        groups, (stride, _) = conv.feature_group_count, _pair(conv.strides)
        self.side, self.stride = kernel.shape[0], stride
        inputs, outputs = kernel.shape[2] * groups, kernel.shape[3]
        self.conv = qnn.QuantConv2d(
            inputs,
            outputs,
            self.side,
            stride=stride,
            groups=groups,
            bias=conv.bias is not None,
            weight_quant=weights,
            weight_bit_width=bits,
        )
        _set(self.conv.weight, kernel.transpose(3, 2, 0, 1))
        if conv.bias is not None:
            _set(self.conv.bias, conv.bias[...])
        self.norm = nn.Identity() if norm is None else nn.BatchNorm2d(outputs, eps=norm.epsilon, momentum=0.1)
        if norm is not None:
            _set(self.norm.weight, norm.scale[...])
            _set(self.norm.bias, norm.bias[...])
            _set(self.norm.running_mean, norm.mean[...])
            _set(self.norm.running_var, norm.var[...])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = [max((-(-size // self.stride) - 1) * self.stride + self.side - size, 0) for size in x.shape[-2:]]
        (top, bottom), (left, right) = ((pad // 2, pad - pad // 2) for pad in total)
        return self.norm(self.conv(nn.functional.pad(x, (left, right, top, bottom))))


class _Head(nn.Module):
    """The mean over the image, at 8 bits, and the dense layer."""

    def __init__(self, dense: nnx.Linear, weights: type) -> None:
        super().__init__()
        kernel = np.asarray(dense.kernel[...])
        self.identity = qnn.QuantIdentity(bit_width=8)
        self.dense = qnn.QuantLinear(*kernel.shape, bias=True, weight_quant=weights, weight_bit_width=8)
        _set(self.dense.weight, kernel.T)
        _set(self.dense.bias, dense.bias[...])  # pyright: ignore[reportOptionalSubscript]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.identity(x.mean((2, 3))))


class _Block(nn.Module):
    def __init__(self, block: Any, bits: tuple[int, int], weights: type) -> None:
        super().__init__()
        of_weights, of_activations = bits
        self.first = _Layer(block.conv1, block.norm1, of_weights, weights)
        self.second = _Layer(block.conv2, block.norm2, of_weights, weights)
        shortcut = block.shortcut
        self.shortcut = nn.Identity() if shortcut is None else _Layer(shortcut, None, of_weights, weights)
        self.inner = qnn.QuantReLU(bit_width=of_activations)
        self.outer = qnn.QuantReLU(bit_width=of_activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.second(self.inner(self.first(x))) + self.shortcut(x))


def _resnet(model: ResNet, bits: tuple[int, int], weights: type) -> nn.Module:
    return nn.Sequential(
        qnn.QuantIdentity(bit_width=8),
        _Layer(model.stem, model.norm, 8, weights),
        qnn.QuantReLU(bit_width=bits[1]),
        *(_Block(block, bits, weights) for block in model.blocks),
        _Head(model.head, weights),
    )


def _depthwise(model: Depthwise, bits: tuple[int, int], weights: type) -> nn.Module:
    parts: list[nn.Module] = [qnn.QuantIdentity(bit_width=8)]
    for index, layer in enumerate(model.body.layers):
        parts.append(_Layer(layer.conv, layer.bn, bits[0] if index else 8, weights))
        parts += [nn.ReLU6(), qnn.QuantReLU(bit_width=bits[1])]
    return nn.Sequential(*parts, _Head(model.head, weights))


def ported(model: Any, bits: tuple[int, int], weights: type = Int8WeightPerChannelFloat) -> nn.Module:
    """The float model's weights in a torch module; bits: of weights and of activations.

    Raises:
      ValueError: there is no such network in torch here.
      RuntimeError: without its quantizers the module computes something else than the float model.
    """
    if isinstance(model, ResNet):
        net = _resnet(model, bits, weights)
    elif isinstance(model, Depthwise):
        net = _depthwise(model, bits, weights)
    else:
        raise ValueError(f"Brevitas: expected a ResNet or a Depthwise, got {type(model).__name__}.")
    _compare(net, model)
    return net


def _compare(net: nn.Module, model: Any) -> None:
    images = np.random.default_rng(0).random((4, 28, 28, 1), np.float32)
    proxies = [part for part in net.modules() if hasattr(part, "disable_quant")]
    net.eval()
    for part in proxies:
        part.disable_quant = True  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        ours, theirs = np.asarray(model(images)), net(_channels_first(images)).numpy()
    for part in proxies:
        part.disable_quant = False  # pyright: ignore[reportAttributeAccessIssue]
    if not np.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(ours).max()):
        raise RuntimeError(
            f"Brevitas: expected the float model's scores, got others, by up to {np.abs(ours - theirs).max()}."
        )


def trained(start: Any, weights: type) -> Callable[[np.ndarray], np.ndarray]:
    """The loop of `train.fit` with the optimizer of `methods.adam`; returns images -> class scores."""
    torch.manual_seed(start.seed)
    net = ported(start.model, (start.setting.weights, start.setting.activations), weights)
    net.train()
    images, labels = start.data.train_images, torch.from_numpy(start.data.train_labels.astype(np.int64))
    optimizer = torch.optim.Adam(net.parameters(), start.rate / 3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps_of(images, start.epochs))
    rng = np.random.default_rng(start.seed)
    for _ in range(start.epochs):
        for chosen in rng.permutation(len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(_channels_first(images[chosen])), labels[torch.from_numpy(chosen)])
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()

    def run(given: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.concatenate([net(_channels_first(given[i : i + 500])).numpy() for i in range(0, len(given), 500)])

    return run


def _channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _pair(strides: Any) -> tuple[int, int]:
    return (strides, strides) if isinstance(strides, int) else (strides[0], strides[1])


def _set(parameter: torch.Tensor, values: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(values)))
