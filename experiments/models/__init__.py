"""The models of the experiments: plain Flax. Nothing in them knows about quantization.

`small` holds the networks for 8x8 digits that the demo trains; every other file is one family of published
architectures, with its own sizes and a tiny one: see `experiments.architectures`.
"""

from experiments.models.small import CNN, MLP, ResidualBlock, ResNet

__all__ = ["CNN", "MLP", "ResNet", "ResidualBlock"]
