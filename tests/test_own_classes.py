"""Classes of the user's own go in and out of the quantized model, the exact forward and the graph."""

import collections
import dataclasses
import typing

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

X = jax.random.normal(jax.random.key(0), (3, 4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Its fields are not in the order of the alphabet."""

    logits: typing.Any
    hidden: typing.Any
    attentions: typing.Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    x: jax.Array
    bias: jax.Array
    double: bool = dataclasses.field(metadata={"static": True}, default=False)


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A pytree whose parts have no names."""

    def __init__(self, *parts: typing.Any) -> None:
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


class Pair(typing.NamedTuple):
    b: typing.Any
    a: typing.Any


class Net(nnx.Module):
    """Two arrays, put into what `form` makes of them."""

    def __init__(self, form) -> None:
        self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.temperature = nnx.Param(jnp.array([0.5, 2.0]))
        self.form = form

    def __call__(self, x):
        if isinstance(x, Inputs):
            x = x.x * 2 + x.bias if x.double else x.x + x.bias
        return self.form(self.dense(x), nnx.relu(x), self.temperature[...])


def of_two(logits, hidden, temperature):
    return Output(logits, hidden)


FORMS = {
    "dataclass": of_two,
    "FrozenDict": lambda a, b, t: flax.core.FrozenDict(b=a, a=b),
    "OrderedDict": lambda a, b, t: collections.OrderedDict(b=a, a=b),
    "namedtuple": lambda a, b, t: Pair(a, b),
    "unnamed": lambda a, b, t: Unnamed(a, {"y": b}),
    "None": lambda a, b, t: (a, None),
    "a constant": lambda a, b, t: {"scaled": a, "a temperature": t},
    "nested": lambda a, b, t: [Output(Pair(a, None), b, t), ()],
}


def quantized(form, sample: typing.Any = X):
    qmodel = qjax.quantize(Net(form), qjax.Recipe(), sample)
    qmodel.eval()
    return qmodel


def equal(a, b) -> bool:
    same = jax.tree.structure(a) == jax.tree.structure(b)
    return same and all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.sampled(1)
def test_outputs_keep_their_class(form, tmp_path):
    qmodel = quantized(form)
    graph = qjax.convert(qmodel, X)
    wanted, found = qmodel(X), graph(X)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert type(found) is type(wanted)
    # a file knows no classes, but every number
    graph.save(tmp_path / "net.qjax")
    loaded = qjax.load(tmp_path / "net.qjax")
    assert all(any(np.array_equal(x, y) for y in jax.tree.leaves(loaded(X))) for x in jax.tree.leaves(found))


def test_a_class_within_classes_is_exact(tmp_path):
    qmodel = quantized(FORMS["nested"])
    graph = qjax.convert(qmodel, X)
    assert equal(nnx.jit(qjax.exact(qmodel, X))(qmodel, X), graph(X))
    graph.save(tmp_path / "net.qjax")
    for each in (graph, qjax.load(tmp_path / "net.qjax")):
        assert qjax.verify(each, qmodel, [X]).exact


def test_a_loaded_graph_returns_a_dict_of_the_fields(tmp_path):
    graph = qjax.convert(quantized(of_two), X)
    graph.save(tmp_path / "net.qjax")
    found, loaded = graph(X), qjax.load(tmp_path / "net.qjax")(X)
    assert set(loaded) == {"logits", "hidden", "attentions"}
    assert loaded["attentions"] is None
    assert np.array_equal(loaded["logits"], found.logits)
    assert np.array_equal(loaded["hidden"], found.hidden)


@pytest.mark.exhaustive
def test_constants_are_the_parameters_of_the_call():
    qmodel = quantized(FORMS["a constant"])
    forward = qjax.exact(qmodel, X)

    @nnx.jit
    def loss(qmodel):
        return jnp.sum(forward(qmodel, X)["a temperature"])

    assert loss(qmodel) == 2.5
    gradient = nnx.grad(loss)(qmodel)["model"]["temperature"]
    assert np.array_equal(gradient[...], [1, 1])
    assert qjax.convert(qmodel, X).retarget("torch_qnnpack")(X)["a temperature"].tolist() == [0.5, 2.0]


def test_a_constant_that_follows_the_batch_is_refused():
    qmodel = quantized(lambda a, b, t: (a, jnp.zeros(a.shape)))
    with pytest.raises(qjax.ConversionError, match="the model returns a constant, which depends on no input"):
        qjax.convert(qmodel, X)


def test_a_model_of_constants_alone_is_refused():
    qmodel = quantized(lambda a, b, t: t)
    with pytest.raises(qjax.ConversionError, match="The model returns nothing that depends on its arguments"):
        qjax.convert(qmodel, X)


def test_an_input_that_is_returned_unread_is_refused():
    class Passes(nnx.Module):
        def __init__(self):
            self.net = Net(of_two)

        def __call__(self, x, other):
            return self.net(x), other

    qmodel = qjax.quantize(Passes(), qjax.Recipe(), (X, X))
    with pytest.raises(qjax.ConversionError, match="returns its input 'input/1' as it is"):
        qjax.convert(qmodel, (X, X))


def test_arguments_in_a_class(tmp_path):
    sample = Inputs(X, X + 1)
    qmodel = quantized(of_two, sample)
    graph = qjax.convert(qmodel, sample)
    assert equal(qjax.exact(qmodel, sample)(qmodel, sample), graph(sample))
    assert equal(graph({"x": X, "bias": X + 1}), graph(sample))
    assert not equal(graph({"x": X, "bias": X}), graph(sample))
    with pytest.raises(TypeError, match=r"got Inputs\. Its class or its static fields differ"):
        graph(dataclasses.replace(sample, double=True))
    graph.save(tmp_path / "net.qjax")
    loaded = qjax.load(tmp_path / "net.qjax")
    assert np.array_equal(loaded({"x": X, "bias": X + 1})["logits"], graph(sample).logits)
    with pytest.raises(TypeError, match="A graph from a file knows no classes at all: give a dict"):
        loaded(sample)


@pytest.mark.exhaustive
def test_an_ordered_dict_of_arguments_keeps_its_order():
    sample = collections.OrderedDict(x=X, bias=X + 1)

    class Ordered(Net):
        def __call__(self, given):
            return super().__call__(Inputs(given["x"] * 3, given["bias"]))

    qmodel = qjax.quantize(Ordered(of_two), qjax.Recipe(), sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    assert not equal(graph(collections.OrderedDict(x=X, bias=X)), graph(sample))
    assert equal(graph({"bias": X + 1, "x": X}), graph(sample))


class Writes(nnx.Module):
    def __init__(self, how: str) -> None:
        self.net, self.how, self.last = Net(of_two), how, nnx.Variable(jnp.zeros((3, 4)))

    def __call__(self, x):
        if self.how == "sow":
            self.seen = nnx.Intermediate(x)
        elif self.how == "make":
            self.loss = nnx.Variable(x.mean())
        else:
            self.last[...] = x
        return self.net(x)


def test_what_a_call_stores():
    qmodel = qjax.quantize(Writes("sow"), qjax.Recipe(), X)
    assert equal(qjax.convert(qmodel, X)(X), qjax.convert(quantized(of_two), X)(X))
    with pytest.raises(ValueError, match="creates the variable 'loss', which the module did not have before"):
        qjax.quantize(Writes("make"), qjax.Recipe(), X)
    qmodel = qjax.quantize(Writes("write"), qjax.Recipe(), X)
    with pytest.raises(qjax.ConversionError, match="writes the variable 'last' from its arguments"):
        qjax.convert(qmodel, X)
