"""Block reconstruction: blocks are found in the program, and their outputs get better on other inputs."""

import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training.brecq import blocks_of
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from tests.analysis.models import data


class Residual(nnx.Module):
    """A convolution, two residual blocks (of two layers and of one), a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 12, (3, 3), rngs=rngs)
        self.up, self.down = nnx.Conv(12, 24, (1, 1), rngs=rngs), nnx.Conv(24, 12, (3, 3), rngs=rngs)
        self.one = nnx.Conv(12, 12, (3, 3), rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        x = nnx.relu(x + self.down(nnx.relu(self.up(x))))
        x = nnx.relu(x + self.one(x))
        return self.head(x.mean((1, 2)))


def images(seeds):
    # neighbouring pixels and channels that are alike, as in photographs
    mixing = np.asarray(data(3, 3, seed=7)) + 1.5
    return [np.cumsum(np.asarray(data(8, 8, 8, 3, seed=s)), 1) @ mixing / np.float32(4) for s in seeds]


IMAGES = images(range(8))
FEW = qjax.Recipe(weights=qjax.QSpec(bits=3, axis=-1))


@pytest.fixture(scope="module")
def solved():
    before = qjax.quantize(Residual(), FEW, IMAGES[0])
    qjax.calibrate(before, IMAGES, progress=False)
    before.eval()
    after = nnx.clone(before)
    return before, after, qjax.training.brecq(after, IMAGES, steps=200, progress=False)


@pytest.mark.exhaustive
def test_blocks_lie_between_single_tensors(solved):
    before, _, found = solved
    blocks, entering = blocks_of(Walk(before, [(x,) for x in IMAGES]), [(x,) for x in IMAGES])
    names = [block.names for block in blocks if block.names]
    assert names == [("stem/kernel",), ("up/kernel", "down/kernel"), ("one/kernel",), ("head/kernel",)]
    assert [block.names for block in found.blocks] == names
    assert len(entering) == len(IMAGES)
    # one after the other they are the model
    for stream in (Stream.of(before), Stream.of(before, quantized=False)):
        tensors = entering[0]
        for block in blocks:
            tensors = block(0, stream, tensors)
        (wanted,) = Walk(before, [(IMAGES[0],)]).outputs(stream, [(IMAGES[0],)])
        assert np.array_equal(tensors[0], wanted)


@pytest.mark.exhaustive
def test_the_output_gets_better_on_other_inputs(solved):
    before, after, found = solved
    assert all(block.after <= block.before for block in found.blocks)
    assert sum(block.changed for block in found.blocks) > 0
    others = [(x,) for x in images(range(100, 108))]
    walk = Walk(before, others)
    truth = walk.outputs(Stream.of(before, quantized=False), others)
    plain, learned = (noise_of(truth, walk.outputs(Stream.of(model), others)) for model in (before, after))
    assert learned < 0.7 * plain
    assert "before, dB" in str(found)
    # each weight is one of its codes, with the scales as they were
    for name, code in qjax.training.codes_of(after, qjax.training.weights_of(after, IMAGES[0]).names).items():
        scale = np.asarray(after.qparams()[name].scale)
        assert np.array_equal(scale, before.qparams()[name].scale)
        assert np.max(np.abs(np.asarray(code))) <= 3, name


@pytest.mark.exhaustive
def test_what_was_learned_is_what_ships(solved):
    _, after, _ = solved
    x = IMAGES[0]
    assert np.array_equal(qjax.exact(after, x)(after, x), qjax.convert(after, x)(x))


def test_a_model_without_a_layer_says_so():
    class Nothing(nnx.Module):
        def __call__(self, x):
            return nnx.relu(x) + x

    with pytest.raises(ValueError, match="brecq: expected a dense layer or a convolution, got none"):
        qjax.training.brecq(qjax.quantize(Nothing(), qjax.Recipe(), data(4, 3)), [data(4, 3)])
