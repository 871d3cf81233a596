"""Rotation of a residual stream: the float function stays, outliers are spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.residual_streams import find_residuals
from qjax.contrib.post_training.rotation import rotated, rotation


class Decoder(nnx.Module):
    """Words and positions, attention and a gated part with norms in front, a norm and a head; one channel is great."""

    def __init__(self, norm=nnx.LayerNorm, width=24):
        rngs = nnx.Rngs(0)
        self.words, self.positions = nnx.Embed(30, width, rngs=rngs), nnx.Embed(6, width, rngs=rngs)
        self.words.embedding[...] = self.words.embedding[...].at[:, 3].multiply(60)
        self.norms = nnx.List(norm(width, rngs=rngs) for _ in range(3))
        for index, one in enumerate(self.norms):
            scale = jnp.abs(jax.random.normal(jax.random.key(index), (width,))) + jnp.float32(0.5)
            # trained models give a great channel little weight
            nnx.update(one, {"scale": scale.at[3].multiply(0.05)})
            if norm is nnx.LayerNorm:
                nnx.update(one, {"bias": jax.random.normal(jax.random.key(9), (width,))})
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.gate, self.up = nnx.Linear(width, 32, use_bias=False, rngs=rngs), nnx.Linear(width, 32, rngs=rngs)
        self.down, self.head = nnx.Linear(32, width, rngs=rngs), nnx.Linear(width, 7, rngs=rngs)

    def __call__(self, words):
        x = self.words(words) + self.positions(jnp.arange(words.shape[1]))[None]
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x))


WORDS = [np.random.default_rng(s).integers(0, 30, (8, 6)).astype(np.int32) for s in range(4)]


@pytest.mark.parametrize("width", [8, 12, 7, 24])
def test_a_rotation_is_orthogonal_and_keeps_ones(width):
    q = rotation(width, np.random.default_rng(0))
    np.testing.assert_allclose(q @ q.T, np.eye(width), atol=1e-12)
    np.testing.assert_allclose(q @ np.ones(width), np.ones(width), atol=1e-12)


@pytest.mark.parametrize("norm", [nnx.LayerNorm, nnx.RMSNorm])
@pytest.mark.sampled(1)
def test_the_float_function_is_the_same_in_float64(norm):
    model = Decoder(norm)
    qmodel = qjax.quantize(model, qjax.Recipe(), WORDS[0])
    residuals, left = find_residuals(qmodel.trace(WORDS[0]), qjax.training.weights_of(qmodel, WORDS[0]).names)
    assert (len(residuals), left) == (1, [])
    assert len(residuals[0].norms) == 3
    assert {one.bias is None for one in residuals[0].norms} == {norm is nnx.RMSNorm}
    assert set(residuals[0].written) >= {"words/embedding", "positions/embedding", "down/kernel", "down/bias"}
    # an embedding computes in the dtype that it was made with
    model.words.dtype = model.positions.dtype = jnp.float64
    graphdef, state = nnx.split(model)
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = {n: np.asarray(v[...], np.float64) for n, v in flat.items() if v[...].dtype == np.float32}
        changed = rotated(residuals, wide)
        assert len(changed) > 10

        def called(numbers):
            own = jax.tree.map(lambda x: x, state)
            for path, variable in nnx.to_flat_state(own):
                name = "/".join(map(str, path))
                if name in numbers:
                    variable.set_value(jnp.asarray(numbers[name], jnp.float64))
            return np.asarray(nnx.merge(graphdef, own)(WORDS[0]))

        y, turned = called(wide), called({**wide, **changed})
    assert y.dtype == np.float64
    np.testing.assert_allclose(turned, y, rtol=0, atol=1e-12 * np.max(np.abs(y)))


def test_outliers_are_spread_and_the_output_gets_better():
    qmodel = qjax.quantize(Decoder(), qjax.Recipe(), WORDS[0])
    qjax.calibrate(qmodel, WORDS, progress=False)
    before = nnx.clone(qmodel)
    found = qjax.training.rotate(qmodel, WORDS)
    assert (found.widths, found.left) == ((24,), ())
    assert "1 residual streams of width 24" in str(found)
    walk, batches = Walk(before, [(x,) for x in WORDS]), [(x,) for x in WORDS]
    streams = [Stream.of(before, quantized=False), Stream.of(before), Stream.of(qmodel)]
    truth, plain, turned = (walk.outputs(stream, batches) for stream in streams)
    assert noise_of(truth, turned) < 0.7 * noise_of(truth, plain)


@pytest.mark.exhaustive
def test_what_was_rotated_is_exact():
    qmodel = qjax.post_training(Decoder(), qjax.Recipe(), WORDS, steps=["rotate"], progress=False)
    x = WORDS[0]
    assert qmodel.post_training_report is not None
    assert qmodel.post_training_report["rotate"].kept
    assert np.array_equal(qjax.exact(qmodel, x)(qmodel, x), qjax.convert(qmodel, x)(x))


def test_a_model_that_cannot_be_rotated_says_why():
    class PostNorm(nnx.Module):
        """The residual stream is what the norm gives, as in BERT."""

        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layer, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)

        def __call__(self, x):
            x = self.layer(x)
            return self.norm(x + jax.nn.gelu(x))

    x = jnp.ones((4, 8))
    qmodel = qjax.quantize(PostNorm(), qjax.Recipe(), x)
    with pytest.raises(ValueError, match=r"rotate: expected a residual stream between norms, got none: .* to it"):
        qjax.training.rotate(qmodel, [x])
