"""Learned bits: the codes of narrower quantizers, the paper's gradients, and models that ship as they trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax.calibration.learned import Quantizer
from qjax.contrib.learned_bits.dropped_bits import quantized, used
from qjax.numerics.affine import QParams
from qjax.training import LearnedBits, ParetoFront, ebops
from tests.analysis.models import data

SPECS = [
    qjax.QSpec(bits=6),
    qjax.QSpec(bits=6, narrow_range=False),
    qjax.QSpec(bits=6, signed=False),
    qjax.QSpec(bits=8),
]


class Dense(nnx.Module):
    """Two dense layers: 5 * 4 and 4 * 3 multiplications."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class Residual(nnx.Module):
    """Convolutions with batch norm, a depthwise one, a residual sum, a max pool and a mean that a dense layer reads."""

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.stem, self.norm = nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.body = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.relu(x + self.body(x))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.head(jnp.mean(x, axis=(1, 2)))


class Recurrent(nnx.Module):
    """Four steps of a GRU, whose two weights every step reads, and a dense layer on the last."""

    def __init__(self):
        rngs = nnx.Rngs(2)
        self.rnn, self.head = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs), rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        states: Any = self.rnn(x)
        return self.head(states[:, -1])


X = data(16, 5)
SEQUENCES = data(6, 4, 3)
IMAGES = data(8, 6, 6, 2)
POWERS = qjax.Recipe("fpga", activations=qjax.QSpec(bits=8), method="tqt", weight_method="tqt")


def learner(model: nnx.Module, recipe: qjax.Recipe, x: Any, seed: int = 0, **options: Any) -> LearnedBits:
    """With random bits dropped, of each weight unless the options say otherwise."""
    made = LearnedBits(qjax.quantize(model, recipe, x), x, **{"per": "weight", **options})
    rng = np.random.default_rng(seed)
    for k in made.dropped.values():
        k[...] = jnp.asarray(rng.uniform(1, 6, k.shape), jnp.float32)
    return made


forward = nnx.jit(lambda model, x: model(x))


# ---------------------------------------------------------------------- codes


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("method", ["static", "lsq"])
@pytest.mark.sampled(2)
def test_codes_are_those_of_a_quantizer_with_fewer_bits(spec: qjax.QSpec, method: Any):
    scale = np.float32(0.037)
    x = jnp.asarray(np.linspace(-3, 3, 20_001, dtype=np.float32))
    wide = Quantizer(spec, method, x.shape)
    params = {"scale": jnp.asarray(scale), "zero_point": jnp.zeros((), jnp.int32)}
    for k in range(spec.bits - 1):
        narrow = Quantizer(spec.replace(bits=spec.bits - k), "static", x.shape)
        wanted = narrow({**params, "scale": jnp.asarray(scale * np.float32(2**k))}, x)
        found = quantized(wide, params, x, jnp.float32(k), weight=False)
        np.testing.assert_array_equal(found.codes, wanted.codes)
        np.testing.assert_array_equal(jnp.ravel(found.scale), jnp.ravel(wanted.scale))


def test_each_weight_has_its_own_bits():
    """Against integers: every k for every number, in the unit of the least k."""
    spec, scale = qjax.QSpec(bits=8), 0.25
    rng = np.random.default_rng(0)
    w, k = rng.integers(-4 * 127, 4 * 127, 4000) / 16, rng.integers(1, 8, 4000)
    found = quantized(
        Quantizer(spec, "static", w.shape),
        {"scale": jnp.float32(scale), "zero_point": jnp.zeros((), jnp.int32)},
        jnp.asarray(w, jnp.float32),
        jnp.asarray(k, jnp.float32),
        weight=True,
    )
    steps = [round(float(v) / (scale * 2.0**b)) for v, b in zip(w, k, strict=True)]  # Python rounds half to even
    wanted = [max(-(127 >> b), min(127 >> b, c)) * 2 ** (b - 1) for c, b in zip(steps, k.tolist(), strict=True)]
    np.testing.assert_array_equal(np.asarray(found.codes, int), wanted)
    assert float(found.qparams.scale) == 0.5
    assert 0 in wanted
    assert max(wanted) > 32


@pytest.mark.parametrize(("k", "whole"), [(-3, 0), (0.5, 0), (1.5, 2), (2.5, 2), (9, 6), (np.nan, 0), (np.inf, 6)])
def test_bits_are_whole_numbers_within_the_grid(k: float, whole: int):
    assert float(used(jnp.float32(k), 6)) == whole


# ------------------------------------------------------------------ gradients


def value(k: Any, x: Any, scale: Any, method: Any = "lsq") -> jax.Array:
    q = Quantizer(qjax.QSpec(bits=6), method, x.shape)
    params = {"scale": scale, "zero_point": jnp.zeros((), jnp.int32)}
    return jnp.sum(quantized(q, params, x, k, weight=False).real32())


@pytest.mark.parametrize("method", ["static", "lsq"])
def test_without_dropped_bits_gradients_are_those_of_the_method(method: Any):
    x, scale = data(200), jnp.float32(0.05)
    q = Quantizer(qjax.QSpec(bits=6), method, x.shape)

    def own(x: Any, scale: Any) -> jax.Array:
        return jnp.sum(q({"scale": scale, "zero_point": jnp.zeros((), jnp.int32)}, x).real32())

    wanted = jax.grad(own, argnums=(0, 1))(x, scale)
    found = jax.grad(value, argnums=(1, 2))(jnp.float32(0), x, scale, method)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)  # sums of floats in another order
    assert np.abs(np.asarray(x)).max() > 31 * 0.05  # some are clipped


@pytest.mark.exhaustive
def test_the_gradient_of_bits_is_the_papers():
    """HGQ: dv/df = -ln(2) (v - x), so with k = -f it is ln(2) (v - x); nothing where x is clipped."""
    x, scale = jnp.asarray([0.11, -0.32, 0.52, 9.0, -9.0], jnp.float32), jnp.float32(0.0625)
    k = jnp.asarray([2.0, 1.3, 3.0, 1.0, 0.0], jnp.float32)
    found = jax.grad(value)(k, x, scale)
    step = 0.0625 * 2.0 ** np.asarray([2, 1, 3])
    reals = np.round(np.asarray(x[:3], np.float64) / step) * step
    wanted = np.log(2) * (reals - np.asarray(x[:3], np.float64))
    np.testing.assert_allclose(found, [*wanted, 0, 0], rtol=1e-5, atol=1e-7)
    assert float(jax.grad(value)(jnp.float32(-0.1), x, scale)) == 0


@pytest.mark.exhaustive
def test_the_price_of_logic_falls_with_every_bit():
    made = learner(Dense(), POWERS, X)
    graphdef, bits, rest = nnx.split(made, qjax.training.BitsParam, ...)
    slopes = jax.grad(lambda bits: nnx.merge(graphdef, bits, rest).ebops())(bits)
    for name, slope in dict(slopes["dropped"]).items():
        assert np.all(np.asarray(slope[...]) <= 0), name
        assert np.any(np.asarray(slope[...]) < 0), name
    for k in made.dropped.values():
        k[...] = jnp.full_like(k[...], 20.0)
    graphdef, bits, rest = nnx.split(made, qjax.training.BitsParam, ...)
    slopes = jax.grad(lambda bits: nnx.merge(graphdef, bits, rest).ebops())(bits)
    # There is nothing left to save, so nothing drives them on.
    assert all(np.all(np.asarray(slope[...]) == 0) for slope in dict(slopes["dropped"]).values())


# ---------------------------------------------------------------------- costs


@pytest.mark.exhaustive
def test_ebops_are_counted_as_by_hand():
    qmodel = qjax.quantize(Dense(), POWERS, X)
    codes = qjax.training.codes_of(qmodel, ["a/kernel", "b/kernel"])

    def bits(name: str) -> int:
        return sum(len(bin(abs(int(c))).strip("0b")) if c else 0 for c in np.ravel(codes[name]))

    assert ebops(qmodel, X) == 7 * bits("a/kernel") + 7 * bits("b/kernel")
    assert ebops(qmodel, X[:3]) == ebops(qmodel, X)


@pytest.mark.exhaustive
def test_ebops_count_a_convolution_at_every_place():
    qmodel = qjax.quantize(Residual(), qjax.Recipe(activations=qjax.QSpec(bits=5)), IMAGES)
    codes = qjax.training.codes_of(qmodel, ["stem/kernel", "body/kernel", "head/kernel"])
    widths = {n: sum(len(bin(abs(int(c))).strip("0b")) for c in np.ravel(codes[n])) for n in codes}
    assert ebops(qmodel, IMAGES) == 36 * 4 * (widths["stem/kernel"] + widths["body/kernel"]) + 4 * widths["head/kernel"]


@pytest.mark.parametrize("per", ["weight", "channel", "tensor"])
@pytest.mark.sampled(1)
def test_the_learner_counts_no_less_than_its_result(per: Any):
    """Its own count takes zeros behind the last kept bit for logic; else both are one number."""
    made = learner(Dense(), POWERS, X, per=per)
    assert ebops(made.finish(), X) <= float(made.ebops())
    start = LearnedBits(qjax.quantize(Dense(), POWERS, X), X, per=per)
    assert float(start.ebops()) >= ebops(start.finish(), X) > 0


# --------------------------------------------------------------------- models


def check(made: LearnedBits, x: Any) -> qjax.IntegerGraph:
    """The learner, its result, the exact forward and the graph have the same outputs."""
    done = made.finish()
    for training in (True, False):
        made.train() if training else made.eval()
        done.train() if training else done.eval()
        np.testing.assert_array_equal(forward(nnx.clone(made), x), forward(nnx.clone(done), x))
    graph = qjax.convert(done, x)
    np.testing.assert_array_equal(graph(x), qjax.exact(done, x)(done, x))
    return graph


@pytest.mark.exhaustive
@pytest.mark.parametrize("per", ["channel", "weight", "tensor"])
def test_a_dense_network_is_what_it_trained_as(per: Any):
    graph = check(learner(Dense(), POWERS, X, per=per), X)
    assert graph.retarget("fpga").ir.target == "fpga"


@pytest.mark.parametrize(("target", "method"), [("tflite_reference", "lsq"), ("torch_qnnpack", "tqt")])
@pytest.mark.exhaustive
def test_a_network_with_norms_and_averages_is_what_it_trained_as(target: str, method: Any):
    recipe = qjax.Recipe(target, activations=qjax.QSpec(bits=8), method=method, weight_method=method)
    made = learner(Residual(), recipe, IMAGES, seed=1)
    assert dict(made.left) == {}
    check(made, IMAGES)


@pytest.mark.exhaustive
def test_a_recurrent_network_is_what_it_trained_as():
    recipe = qjax.Recipe(activations=qjax.QSpec(bits=8))
    made = learner(Recurrent(), recipe, SEQUENCES)
    kernels = {"rnn/cell/dense_i/kernel", "rnn/cell/dense_h/kernel", "head/kernel"}
    assert made.weights == kernels
    check(made, SEQUENCES)
    counts = {product.names[1]: product.count for product in made.products}
    assert counts == {"rnn/cell/dense_i/kernel": 4 * 3 * 12, "rnn/cell/dense_h/kernel": 4 * 4 * 12, "head/kernel": 8}


def test_what_is_pruned_stays_a_network():
    made = learner(Dense(), POWERS, X)
    made.dropped["a/kernel"][...] = jnp.full((5, 4), 7.0)
    check(made, X)
    assert not np.any(qjax.training.codes_of(made.finish(), ["a/kernel"])["a/kernel"])


@pytest.mark.exhaustive
def test_the_result_has_no_more_bits_than_it_needs():
    made = learner(Dense(), POWERS, X)
    made.dropped["input"][...] = jnp.float32(3)
    made.dropped["a/kernel"][...] = jnp.full((5, 4), 5.0)
    specs = {name: q.spec.bits for name, q in made.finish().plan.quantizers}
    assert specs["input"] == 5
    assert specs["a/kernel"] <= 3
    assert specs["b"] == 8
    # the learner itself stays
    assert made.qmodel.plan.by_name["input"].spec.bits == 8


def test_training_trades_bits_for_loss():
    made = LearnedBits(qjax.quantize(Dense(), POWERS, X), X)
    optimizer = made.optimizer(bits_rate=0.15)
    labels = jnp.asarray(np.arange(16) % 3)

    @nnx.jit
    def step(made: LearnedBits, optimizer: Any, price: Any) -> Any:
        def loss(made: LearnedBits) -> jax.Array:
            task = optax.softmax_cross_entropy_with_integer_labels(made(X), labels).mean()
            return task + price * made.ebops()

        optimizer.update(made, nnx.grad(loss)(made))

    costs = [float(made.ebops())]
    for price in (1e-4, 1e-2):
        for _ in range(19):  # from 40 calls on the step is compiled, see tests/in_numpy.py
            with jax.numpy_dtype_promotion("standard"):  # for optax
                step(made, optimizer, jnp.float32(price))
        costs.append(float(made.ebops()))
    assert costs[2] < costs[1] < costs[0]
    assert costs[2] < 0.3 * costs[0]
    check(made, X)


@pytest.mark.exhaustive
def test_a_circuit_has_less_logic():
    pytest.importorskip("alkaid", reason="alkaid has wheels for x86-64 Linux and ARM macOS only")
    from qjax.contrib import rtl

    made = learner(Dense(), POWERS, X)
    before = rtl.circuit_of(qjax.convert(_evaluation(made.qmodel), X).ir).logic.cost
    graph = qjax.convert(_evaluation(made.finish()), X)
    assert rtl.circuit_of(graph.ir).logic.cost < 0.7 * before


def _evaluation(qmodel: Any) -> Any:
    qmodel.eval()
    return qmodel


# --------------------------------------------------------------------- errors


def test_codes_with_a_zero_point_do_not_learn():
    recipe = qjax.Recipe(activations=qjax.QSpec(symmetric=False))
    made = LearnedBits(qjax.quantize(Dense(), recipe, X), X)
    assert set(dict(made.left)) == {"input", "a"}
    assert "QSpec(symmetric=True)" in dict(made.left)["input"]
    moving = qjax.Recipe(activations=qjax.QSpec(bits=8), method="lsq_plus")
    made = LearnedBits(qjax.quantize(Dense(), moving, X), X)
    assert dict(made.left)["a"] == 'its zero point is learned (method "lsq_plus")'
    both = qjax.Recipe(activations=qjax.QSpec(symmetric=False), weights=qjax.QSpec(symmetric=False))
    with pytest.raises(ValueError, match=r"no tensor can learn its bits. a/kernel|no tensor can learn its bits. input"):
        LearnedBits(qjax.quantize(Dense(), both, X), X)


def test_wrong_arguments():
    qmodel = qjax.quantize(Dense(), POWERS, X)
    with pytest.raises(ValueError, match="per: expected one of weight, channel, tensor, got 'layer'"):
        LearnedBits(qmodel, X, per="layer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="LearnedBits: expected a quantized model"):
        LearnedBits(Dense(), X)  # pyright: ignore[reportArgumentType]
    part = qjax.quantize(Dense(), dataclasses.replace(POWERS, target="onnxruntime", overrides={"b": qjax.FLOAT}), X)
    assert ebops(part, X) > 0


def test_a_front_keeps_what_nothing_beats():
    front, model = ParetoFront(), qjax.quantize(Dense(), POWERS, X)
    assert front.add(100, 0.9, model)
    assert front.add(50, 0.8, model)
    assert front.add(200, 0.95, model)
    assert not front.add(100, 0.9, model)
    assert not front.add(120, 0.85, model)
    assert front.add(90, 0.9, model)
    assert [(p.cost, p.score) for p in front.points] == [(50, 0.8), (90, 0.9), (200, 0.95)]
    assert front.within(199).score == 0.9
    assert "0.9500" in str(front)
    with pytest.raises(ValueError, match=r"no model takes at most 10\. The cheapest takes 50"):
        front.within(10)
    with pytest.raises(ValueError, match="score: expected a finite number, got nan"):
        front.add(1, float("nan"), model)


@pytest.mark.exhaustive
def test_parameters_of_the_result_are_those_of_its_method():
    """TQT says a power of two exactly; a logarithm of LSQ need not, and then the scale is constant."""
    cases: list[tuple[Any, set[str]]] = [("tqt", {"tqt"}), ("lsq", {"static", "lsq"})]
    for method, wanted in cases:
        recipe = qjax.Recipe(method=method, weight_method=method, activations=qjax.QSpec(bits=8))
        made = learner(Dense(), recipe, X)
        done = made.finish()
        assert {str(q.method) for name, q in done.plan.quantizers if name in made.dropped} <= wanted
        scale = made.qmodel.qparams()["input"].scale
        k = float(used(made.dropped["input"][...], 6))
        assert isinstance(done.qparams()["input"], QParams)
        np.testing.assert_array_equal(done.qparams()["input"].scale, scale * np.float32(2**k))
