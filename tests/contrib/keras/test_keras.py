"""Keras 3 models: the same numbers, paths of layers, and the whole way to integers and back."""

# Keras annotates little
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from keras import layers

import qjax
from tests.layers.round_trip import assert_same, assert_verified, check, data

# of Keras itself, under numpy 2.5
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
IMAGES = data(4, 6, 6, 2)


@pytest.fixture(autouse=True)
def default_promotion():
    """Keras relies on JAX's default rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(3, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(2, name="head"),
        ]
    )


def host(model):
    return [np.array(variable.value) for variable in model.variables]


def verified(model, sample, recipe=None):
    """Quantized and converted in evaluation mode, compared with Keras and node by node."""
    wrapped = qjax.from_keras(model)
    wrapped.eval()
    if isinstance(sample, tuple):
        assert_same(wrapped(*sample), model(list(sample), training=False))
    else:
        assert_same(wrapped(sample), model(sample, training=False))
    qmodel = qjax.quantize(wrapped, recipe or qjax.Recipe(), sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    assert_verified(qjax.verify(graph, qmodel, [sample]))
    return qmodel, graph


def test_a_convolutional_network_trains_converts_and_comes_back():
    model = network()
    before = host(model)
    wrapped = qjax.from_keras(model)
    assert isinstance(wrapped.conv.kernel, nnx.Param)
    assert isinstance(wrapped.norm.moving_mean, nnx.BatchStat)
    four, six = (qjax.QSpec(bits=bits, axis=-1) for bits in (4, 6))
    qmodel, graph = check(wrapped, IMAGES, qjax.Recipe(overrides={layers.Dense: four, "conv": six}))
    assert [node.op for node in graph.ir.nodes] == ["conv", "reshape", "dot"]
    assert (graph.ir.nodes[0].name, graph.ir.nodes[-1].name) == ("conv", "head")
    found = {name: q.spec.bits for name, q in qmodel.qparams().items() if name.endswith("kernel")}
    assert found == {"conv/kernel": 6, "head/kernel": 4}
    assert not np.array_equal(qmodel.model.norm.moving_mean[...], wrapped.norm.moving_mean[...])
    assert_same(host(model), before)
    assert qmodel.model.update_keras() is model
    qmodel.model.eval()
    assert_same(qmodel.model(IMAGES), model(IMAGES, training=False))
    assert not np.array_equal(host(model)[0], before[0])


def test_training_mode_computes_what_keras_computes():
    model, twin = network(), network()
    wrapped = qjax.from_keras(model)
    assert_same(wrapped(IMAGES), twin(IMAGES, training=True))
    assert_same(wrapped.norm.moving_variance[...], twin.get_layer("norm").moving_variance.value)
    wrapped.update_keras()
    assert_same(host(model), host(twin))


@pytest.mark.exhaustive
def test_nested_models_with_named_inputs_and_outputs():
    inner_input = keras.Input((5,))
    inner = keras.Model(inner_input, layers.LayerNormalization()(layers.Dense(4, name="a")(inner_input)), name="inner")
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    joined = layers.Add(name="sum")([inner(left), layers.Dense(4, name="b")(right)])
    model = keras.Model([left, right], {"scores": layers.Dense(2, name="head")(joined)})
    a, b = data(3, 5), data(3, 5, seed=1)
    qmodel, graph = verified(model, (a, b))
    assert graph(a, b).keys() == {"scores"}
    assert {"inner/a/kernel", "b/kernel", "head/kernel", "sum/add"} <= qmodel.qparams().keys()
    assert [node.op for node in graph.ir.nodes].count("normalize") == 1
    wrapped = qjax.from_keras(model)
    assert_same(wrapped({"right": b, "left": a}), wrapped(a, b))
    with pytest.raises(ValueError, match=r"'inner/b' matches nothing.*Did you mean 'inner/a'"):
        qjax.quantize(wrapped, qjax.Recipe(overrides={"inner/b": qjax.FLOAT}), (a, b))


class Subclassed(keras.Model):
    """Layers in a list, one of them shared, and a frozen one."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.blocks = [layers.Dense(4, activation="relu", name=f"block_{i}") for i in range(2)]
        self.scaling = layers.Rescaling(0.5)
        self.train_ = layers.Dense(4, name="train", trainable=False)

    def call(self, x):
        x = self.scaling(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.train_(x)


@pytest.mark.exhaustive
def test_a_subclassed_model():
    x = data(3, 4)
    model = Subclassed()
    model(x)
    qmodel, graph = verified(model, x)
    names = [node.name for node in graph.ir.nodes]
    assert names[-4:] == ["block_0", "block_1", "block_1#2", "train_"]
    assert isinstance(qmodel.model.block_1.kernel, nnx.Param)
    assert not isinstance(qmodel.model.train_.kernel, nnx.Param)


@pytest.mark.exhaustive
def test_attention_and_groups():
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention", dropout=0.1)(inputs, inputs)
    model = keras.Model(inputs, layers.RMSNormalization()(layers.GroupNormalization(2)(x + inputs)))
    _, graph = check(qjax.from_keras(model), data(4, 5, 8))
    assert [node.op for node in graph.ir.nodes].count("normalize") == 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*a single number")  # the bias of a new GRU
def test_recurrent_layers_with_a_mask():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="tokens")(inputs)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True, name="cells"), name="both")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.GRU(3, unroll=True)(x)))
    tokens = jnp.asarray([[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]], jnp.int32)
    qmodel, _ = verified(model, tokens)
    assert "both/forward_cells/lstm_cell/kernel" in qmodel.qparams()


def masked_attention():
    tokens = keras.Input((4,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(tokens)
    y = layers.MultiHeadAttention(1, 4, dropout=0.1)(x, x, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(2)(layers.Add()([x, y])))


def masked_norm():
    steps = [layers.Masking(), layers.BatchNormalization(), layers.GaussianDropout(0.3), layers.Dense(2)]
    return keras.Sequential([keras.Input((4, 3)), *steps])


def noisy():
    steps = [layers.Dense(4), layers.GaussianNoise(0.5), layers.Dense(4, "selu"), layers.AlphaDropout(0.3)]
    return keras.Sequential([keras.Input((3,)), *steps, layers.Dense(2)])


def recurrent(layer, **options):
    steps = [layers.Masking(), layer(3, dropout=0.3, **options), layers.Dense(2)]
    return keras.Sequential([keras.Input((4, 3)), *steps])


TRAINED = {
    "noise": (noisy, data(4, 3)),
    "a mask": (masked_norm, data(4, 4, 3)),
    "renormalised": (lambda: keras.Sequential([keras.Input((3,)), layers.BatchNormalization(renorm=True)]), data(4, 3)),
    "dropout in a loop": (lambda: recurrent(layers.SimpleRNN, recurrent_dropout=0.3), data(4, 4, 3)),
    "masked attention": (masked_attention, jnp.asarray([[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]], jnp.int32)),
    "a mask and dropout in a loop": (lambda: recurrent(layers.LSTM), data(4, 4, 3)),
    "a gate each": (lambda: recurrent(layers.GRU, implementation=1, recurrent_dropout=0.3), data(4, 4, 3)),
    "unrolled": (lambda: recurrent(layers.GRU, unroll=True), data(4, 4, 3)),
    "convolutions in a loop": (
        lambda: keras.Sequential([keras.Input((2, 4, 4, 1)), layers.ConvLSTM2D(2, 2, dropout=0.2)]),
        data(2, 2, 4, 4, 1),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*a single number")
def test_layers_that_act_in_training(name):
    build, sample = TRAINED[name]
    keras.utils.set_random_seed(3)
    model = build()
    keras.utils.set_random_seed(3)
    twin = build()
    wrapped = qjax.from_keras(model)
    # numbers and statistics are those of Keras
    assert_same(wrapped(sample), twin(sample, training=True))
    wrapped.update_keras()
    assert_same(host(model), host(twin))
    # and training has the quantizers of evaluation
    check(wrapped, sample)


def test_noise_keeps_the_codes_of_its_tensor():
    model = keras.Sequential([keras.Input((3,)), layers.ReLU(), layers.GaussianNoise(0.5)])
    x = data(64, 3)
    qmodel = qjax.quantize(qjax.from_keras(model), qjax.Recipe(), x)
    (grid,) = qmodel.qparams().values()
    y = np.asarray(qmodel(x))
    assert not np.array_equal(y, np.maximum(x, 0))
    assert_same(np.round(y / np.float32(grid.scale)) * np.float32(grid.scale), y)
    # gradients pass the rounding
    slope = nnx.grad(lambda qmodel, x: qmodel(x).sum(), argnums=1)(qmodel, x)
    assert set(np.unique(slope)) == {0.0, 1.0}


@pytest.mark.exhaustive
def test_channels_first():
    model = keras.Sequential(
        [
            keras.Input((2, 6, 6)),
            layers.Conv2D(3, 3, data_format="channels_first"),
            layers.BatchNormalization(axis=1),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(data_format="channels_first"),
            layers.Dense(2),
        ]
    )
    _, graph = check(qjax.from_keras(model), data(4, 2, 6, 6))
    assert [node.op for node in graph.ir.nodes] == ["conv", "sum", "dot"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    body = [layers.Dense(4, dtype=policy), layers.LayerNormalization(dtype=policy), layers.Dense(2, dtype=policy)]
    _, graph = verified(keras.Sequential([keras.Input((6,)), *body]), data(4, 6))
    assert [node.op for node in graph.ir.nodes] == ["dot", "normalize", "dot"]


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a .quantize. method")
def test_mistakes_say_what_was_expected():
    with pytest.raises(TypeError, match=r"expected a keras.Model or keras.Layer of Keras 3, got Linear"):
        qjax.from_keras(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"of Keras 3, got .*use qjax\.from_function"):
        qjax.from_keras(jnp.sin)
    with pytest.raises(ValueError, match=r"expected a built model, got 'late'.*Call it once on a batch"):
        qjax.from_keras(keras.Sequential([layers.Dense(2)], name="late"))
    rolling = keras.Sequential([keras.Input(batch_shape=(2, 4, 3)), layers.GRU(3, stateful=True, name="rolling")])
    with pytest.raises(ValueError, match=r"got 'rolling' with stateful=True.*initial_state"):
        qjax.from_keras(rolling)
    with pytest.raises(TypeError, match=r"quantize: expected a flax nnx\.Module, got Sequential.*qjax\.from_keras"):
        qjax.quantize(network(), qjax.Recipe(), IMAGES)
    small = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="dense")])
    small.quantize("int8")
    with pytest.raises(ValueError, match=r"Keras has quantized the layer 'dense' \(int8\)"):
        qjax.from_keras(small)


def test_recurrent_dropout_does_not_train_unrolled():
    x = np.random.default_rng(0).normal(size=(2, 2, 3)).astype(np.float32)
    model = keras.Sequential([keras.Input((2, 3)), layers.SimpleRNN(2, unroll=True, recurrent_dropout=0.5)])
    qmodel = qjax.quantize(qjax.from_keras(model), qjax.Recipe(), x)
    qmodel.train()
    with pytest.raises(ValueError, match="was not there when the model was quantized"):
        qmodel(x)


def test_an_error_of_a_layer_is_told_whole():
    model = Subclassed()
    model(data(3, 4))
    expected = r"on a call with \(float32\[3,5\]\): Exception .* Subclassed.call\(\). Input 0 .* incompatible"
    with pytest.raises(qjax.TraceError, match=expected):
        qjax.quantize(qjax.from_keras(model), qjax.Recipe(), data(3, 5))


@pytest.mark.exhaustive
def test_another_backend_is_refused():
    code = (
        "import keras, qjax\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "try: qjax.from_keras(model)\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {"KERAS_BACKEND": "numpy", "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "got the backend 'numpy'" in done.stdout, done.stderr
    assert "KERAS_BACKEND" in done.stdout
