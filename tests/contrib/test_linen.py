"""Flax linen modules: the same numbers, the same paths, and the whole way to integers."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, assert_verified, check, data

X = data(4, 3)
KEY = jax.random.key(0)
MODES = {"training": {"train": True}, "evaluation": {"train": False}}


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.features)(x))
        return nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = Block(5, name="first")(x, train)
        return nn.Dense(2)(Block(4)(x, train))


class Grouped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(4, (3, 3))(x)))
        return nn.log_softmax(nn.Dense(3)(x.mean((1, 2))))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(4)(nn.relu(nn.Dense(4)(x))), None


class Stack(nn.Module):
    """Layers made by scan and rematerialised, over embedded tokens."""

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(7, 4)(batch["tokens"])
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = layers(name="layers")(x, None)
        return {"scores": nn.Dense(2)(x)}


class Cnn(nn.Module):
    def setup(self):
        self.conv = nn.Conv(3, (3, 3))
        self.norm = nn.BatchNorm()
        self.head = nn.Dense(2)

    def __call__(self, x, train):
        x = nn.relu(self.norm(self.conv(x), use_running_average=not train))
        return self.head(nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


@pytest.fixture(scope="module")
def mlp():
    module = Mlp()
    return module, module.init(KEY, X, train=False)


def wrapped(mlp):
    return qjax.from_linen(*mlp, **MODES, rngs=nnx.Rngs(dropout=1))


def test_it_computes_what_the_module_computes(mlp):
    module, variables = mlp
    model = wrapped(mlp)
    key = nnx.Rngs(dropout=1).dropout()
    want, changed = module.apply(variables, X, train=True, rngs={"dropout": key}, mutable=["batch_stats"])
    assert np.array_equal(model(X), want)
    statistics = changed["batch_stats"]["first"]["BatchNorm_0"]
    assert np.array_equal(model.first.BatchNorm_0.mean[...], statistics["mean"])
    assert np.array_equal(model.first.BatchNorm_0.var[...], statistics["var"])
    model.eval()
    assert np.array_equal(model(X), module.apply({**variables, **changed}, X, train=False))


def test_the_variables_keep_their_paths(mlp):
    model = wrapped(mlp)
    assert isinstance(model.first.Dense_0.kernel, nnx.Param)
    assert isinstance(model.Block_0.BatchNorm_0.var, nnx.BatchStat)
    assert model.Dense_0.bias.shape == (2,)


@pytest.mark.exhaustive
def test_a_perceptron_with_batch_norm_and_dropout(mlp):
    overrides = {nn.Dense: qjax.QSpec(bits=4, axis=-1), "first/.*": qjax.QSpec(bits=6, axis=-1)}
    qmodel, graph = check(wrapped(mlp), X, qjax.Recipe(overrides=overrides))
    bits = {name: p.spec.bits for name, p in qmodel.qparams().items() if name.endswith("kernel")}
    assert bits == {"first/Dense_0/kernel": 6, "Block_0/Dense_0/kernel": 4, "Dense_0/kernel": 4}
    assert [node.name for node in graph.ir.nodes] == ["first/Dense_0", "Block_0/Dense_0", "Dense_0"]


@pytest.mark.exhaustive
def test_a_convolutional_network():
    x = data(2, 4, 4, 2)
    module = Cnn()
    qmodel = qjax.quantize(qjax.from_linen(module, module.init(KEY, x, train=False), **MODES), qjax.Recipe(), x)
    qmodel.eval()
    assert_verified(qjax.verify(qjax.convert(qmodel, x), qmodel, [x]))
    assert {"conv/kernel", "head/kernel", "conv", "head"} <= qmodel.qparams().keys()


@pytest.mark.exhaustive
def test_groups_of_channels_and_a_log_softmax():
    x = data(2, 4, 4, 2)
    module = Grouped()
    qmodel = qjax.quantize(qjax.from_linen(module, module.init(KEY, x)), qjax.Recipe(), x)
    graph = qjax.convert(qmodel, x)
    report = qjax.verify(graph, qmodel, [x])
    assert_verified(report)
    assert report.local == 0
    assert [node.op for node in graph.ir.nodes] == ["conv", "normalize", "sum", "dot", "log_softmax"]


def test_lifted_scan_and_remat_and_dicts():
    batch = {"tokens": jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)}
    module = Stack()
    variables = module.init(KEY, batch)
    model = qjax.from_linen(module, variables)
    assert_same(model(batch), module.apply(variables, batch))
    qmodel = qjax.quantize(model, qjax.Recipe(), batch)
    qmodel.eval()
    graph = qjax.convert(qmodel, batch)
    assert_verified(qjax.verify(graph, qmodel, [batch]))
    assert qmodel.qparams()["layers/Dense_0/kernel"].scale.shape == (2, 4)
    assert graph(batch).keys() == {"scores"}


@pytest.mark.exhaustive
def test_inside_of_an_nnx_module_and_another_method(mlp):
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = wrapped(mlp)

        def __call__(self, x):
            return self.inner(x)

    qmodel = qjax.quantize(Outer(), qjax.Recipe(overrides={Block: qjax.QSpec(bits=5, axis=-1)}), X)
    assert qmodel.qparams()["inner/first/Dense_0/kernel"].spec.bits == 5

    class Two(nn.Module):
        def setup(self):
            self.dense = nn.Dense(2)

        def __call__(self, x):
            return self.dense(x)

        def encode(self, x):
            return nn.relu(self.dense(x))

    module = Two()
    variables = module.init(KEY, X)
    model = qjax.from_linen(module, variables, method="encode")
    assert np.array_equal(model(X), module.apply(variables, X, method="encode"))


class Shifted(nn.Module):
    """A Swin block: its mask is None where nothing is shifted."""

    late: bool = False

    @nn.compact
    def __call__(self, x):
        mask = self.variable("attention", "mask", lambda: None)
        if self.late and not self.is_initializing():
            mask.value = jnp.ones(())
        x = nn.Dense(4)(x)
        return x if mask.value is None else x * mask.value


def test_a_variable_may_be_none():
    module, x = Shifted(), X[:, :6]
    variables = module.init(jax.random.key(0), x)
    model = qjax.from_linen(module, variables)
    assert np.array_equal(model(x), module.apply(variables, x))
    with pytest.raises(ValueError, match=r"the variable 'attention/mask' was None, and a call gave it a value"):
        qjax.from_linen(Shifted(late=True), variables)(x)


def test_errors(mlp):
    module, variables = mlp
    with pytest.raises(TypeError, match=r"expected a flax nnx\.Module, got Mlp.*qjax\.from_linen\(module, variables\)"):
        qjax.quantize(module, qjax.Recipe(), X)
    with pytest.raises(TypeError, match=r"expected a flax\.linen\.Module, got Linear"):
        qjax.from_linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), variables)
    with pytest.raises(TypeError, match=r"expected the variables that module\.init returned"):
        qjax.from_linen(module, X)


@pytest.mark.exhaustive
def test_a_flag_that_is_traced_where_nothing_is_dropped():
    """As `nn.remat` makes of the flags of a layer whose dropout rate is 0."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            return nn.Dropout(0.0)(nn.Dense(4)(x), deterministic=deterministic)

    class Rematerialized(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.remat(Block)()(x, not train)

    x = data(3, 6)
    module = Rematerialized()
    variables = module.init(jax.random.key(0), x, False)
    model = qjax.from_linen(module, variables, training={"train": True}, evaluation={"train": False})
    check(model, x)


@pytest.mark.exhaustive
def test_a_flag_that_is_traced_where_nothing_is_dropped_in_nnx():
    class Block(nnx.Module):
        def __init__(self):
            self.dense, self.drop = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.0, rngs=nnx.Rngs(1))

        def __call__(self, x, deterministic):
            return self.drop(self.dense(x), deterministic=deterministic)

    class Rematerialized(nnx.Module):
        def __init__(self):
            self.block = Block()

        def __call__(self, x):
            return nnx.remat(Block.__call__)(self.block, x, jnp.asarray(True))

    check(Rematerialized(), data(3, 6))
