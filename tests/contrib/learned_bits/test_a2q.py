"""Accumulator-aware weights against unbounded integers: whatever the weights and scales, no input can overflow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qjax
from qjax.training import AccumulatorConstraint, accumulator_bound, constrain_accumulators
from tests.analysis.models import data


class Net(nnx.Module):
    """A convolution whose input has a zero point inside of its range, and a linear layer behind a relu."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean(axis=(1, 2)))


def recipe(bits: int = 4, **more: Any) -> qjax.Recipe:
    weights = qjax.QSpec(bits=bits, axis=-1)
    activations = qjax.QSpec(bits=bits, symmetric=False)
    return qjax.Recipe(weights=weights, activations=activations, observer="minmax", weight_observer="minmax", **more)


X = data(5, 6, 6, 2)


@pytest.fixture(scope="module")
def net():
    return qjax.quantize(Net(), recipe(), X)


@pytest.fixture(scope="module")
def constraints() -> dict[tuple[int, bool], AccumulatorConstraint]:
    """By bits and `plus`: each takes a trace of the model, and none depends on its numbers."""
    return {}


project = nnx.jit(lambda constraint, qmodel: constraint.project(qmodel))


def worst(codes: Any, low: int, high: int) -> tuple[int, int]:
    """The least and the greatest sum over inputs in [low, high], in Python's integers."""
    codes = [int(q) for q in np.asarray(codes).ravel()]
    return sum(min(q * low, q * high) for q in codes), sum(max(q * low, q * high) for q in codes)


def weight_codes(qmodel: Any) -> dict[str, np.ndarray]:
    """Of the two weights of `Net`, (codes summed, channels)."""
    model, qparams = qmodel.model, qmodel.qparams()
    weights = {"conv/kernel": model.conv.kernel[...], "head/kernel": model.head.kernel[...]}
    codes = {name: np.asarray(qjax.numerics.quantize(w, qparams[name])) for name, w in weights.items()}
    return {name: q.reshape(-1, q.shape[-1]) for name, q in codes.items()}


# ---------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("plus", [False, True])
@given(data_=st.data())
@settings(max_examples=60)
def test_codes_within_the_bound_cannot_overflow(plus, data_):
    bits, width = data_.draw(st.integers(4, 32)), data_.draw(st.integers(2, 8))
    symmetric, signed = data_.draw(st.booleans()), data_.draw(st.booleans())
    spec = qjax.QSpec(bits=width, signed=signed, symmetric=symmetric)
    zero_point = 0 if symmetric else data_.draw(st.integers(spec.qmin, spec.qmax))
    bound = accumulator_bound(bits, spec, plus)
    share = bound // 2 if plus else data_.draw(st.integers(0, bound))
    codes = [share, -(bound - share)]
    low, high = worst(codes, spec.qmin - zero_point, spec.qmax - zero_point)
    assert low >= -(2 ** (bits - 1))
    assert high <= 2 ** (bits - 1) - 1


def test_the_bounds_are_the_papers():
    unsigned, signed = qjax.QSpec(bits=4, signed=False, symmetric=False), qjax.QSpec(bits=4)
    assert accumulator_bound(12, unsigned) == 2047 // 16
    assert accumulator_bound(12, signed) == 2047 // 8
    assert accumulator_bound(9, unsigned, plus=True) == (2**9 - 2) // 15
    # one code more of either sign overflows
    half = accumulator_bound(9, unsigned, plus=True) // 2
    assert worst([half + 1, -half], 0, 15)[1] > 255
    with pytest.raises(ValueError, match="2 to 32 bits, got 33"):
        accumulator_bound(33, unsigned)


# ---------------------------------------------------------------------------- the projection


@pytest.mark.exhaustive
def test_what_satisfies_the_bound_stays(net):
    qmodel = nnx.clone(net)
    before = jax.tree.leaves(nnx.state(qmodel))
    constrain_accumulators(qmodel, X, 20).project(qmodel)
    assert all(jnp.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(nnx.state(qmodel)), strict=True))
    constraint = constrain_accumulators(qmodel, X, 8)
    constraint.project(qmodel)
    once = np.asarray(qmodel.model.conv.kernel[...])
    constraint.project(qmodel)
    assert np.array_equal(once, qmodel.model.conv.kernel[...])


@pytest.mark.sampled(1)
@pytest.mark.compiled
@pytest.mark.parametrize("plus", [False, True])
@given(seed=st.integers(0, 2**32 - 1), bits=st.integers(6, 13), spread=st.floats(-2, 3))
@example(seed=2762, bits=6, spread=-1.0)
@settings(max_examples=20)
def test_projected_codes_cannot_overflow(net, constraints, plus, seed, bits, spread):
    rng = np.random.default_rng(seed)
    qmodel = nnx.clone(net)
    if (bits, plus) not in constraints:
        constraints[bits, plus] = constrain_accumulators(qmodel, X, bits, plus=plus)
    constraint = constraints[bits, plus]
    for name, layer in (("conv/kernel", qmodel.model.conv), ("head/kernel", qmodel.model.head)):
        kernel = rng.normal(size=layer.kernel.shape) * 2**spread + rng.normal() * 0.1
        layer.kernel[...] = jnp.asarray(kernel, jnp.float32)
        scale = qmodel.quantizers[name].log2_scale
        scale[...] = jnp.asarray(rng.uniform(-4, 1, scale.shape), jnp.float32)
    before = weight_codes(qmodel)
    project(constraint, qmodel)
    qparams = qmodel.qparams()
    for (name, codes), source in zip(weight_codes(qmodel).items(), ("input", "conv"), strict=True):
        spec, zero_point = qparams[source].spec, int(qparams[source].zero_point)
        # Small weights on coarse scales have no codes to begin with. The projection leaves some of all others.
        assert codes.any() == before[name].any()
        for column in codes.T:
            low, high = worst(column, spec.qmin - zero_point, spec.qmax - zero_point)
            assert low >= -(2 ** (bits - 1)), name
            assert high <= 2 ** (bits - 1) - 1, name


@pytest.mark.parametrize("plus", [False, True])
def test_one_threshold_per_channel_and_the_least_one(net, plus):
    """Duchi et al. 2008, theorem 1 and figure 1: what is left are the magnitudes above a threshold, less it."""
    qmodel = nnx.clone(net)
    before = np.asarray(qmodel.model.conv.kernel[...], np.float64).reshape(-1, 4)
    constraint = constrain_accumulators(qmodel, X, 8, plus=plus)
    constraint.project(qmodel)
    after = np.asarray(qmodel.model.conv.kernel[...], np.float64).reshape(-1, 4)
    scale, bound = np.asarray(qmodel.qparams()["conv/kernel"].scale, np.float64), constraint.bounds["conv/kernel"]
    for w, v, s in zip(before.T, after.T, scale, strict=True):
        for sign in [(1,), (-1,)] if plus else [(1, -1)]:
            mine = np.isin(np.sign(w), sign)
            kept = mine & (v != 0)
            threshold = (np.abs(w) - np.abs(v))[kept]
            np.testing.assert_allclose(threshold, threshold[0], rtol=0, atol=2e-7)
            assert threshold[0] > 0
            assert np.all(np.abs(w)[mine & ~kept] <= threshold[0] + 2e-7)
            less = np.rint(np.clip((np.maximum(np.abs(w[mine]) - threshold[0] + 1e-5, 0)) / s, 0, 7))
            assert less.sum() > (bound // 2 if plus else bound)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plus", [False, True])
def test_the_converted_graph_says_so_and_a_wrapping_register_changes_nothing(net, plus):
    bits, x = 8, np.asarray(data(40, 6, 6, 2, seed=3)) * 3
    qmodel = nnx.clone(net)
    qmodel.eval()
    free = qjax.convert(qmodel, X)
    assert qjax.accumulators(free).bits > bits
    constraint = constrain_accumulators(qmodel, X, bits, plus=plus)
    constraint.project(qmodel)
    graph = qjax.convert(qmodel, X)
    assert qjax.accumulators(graph).bits <= bits
    register = qjax.numerics.Accumulator(bits=bits, overflow="wrap")
    narrow = qjax.targets.Target(f"a2q_test_{plus}", accumulator=register)
    assert np.array_equal(graph.retarget(narrow)(x), graph(x))
    # the test can fail: without the constraint the same register spoils outputs
    assert not np.array_equal(free.retarget(narrow)(x), free(x))


@pytest.mark.compiled
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_first_scales_are_those_of_least_error(net, plus, every):
    """No other scale, bounded by the same projection, is nearer to the weight; and calibrated ones are farther."""
    constraint, name = constrain_accumulators(net, X, 8, plus=plus), "conv/kernel"
    real = np.asarray(net.model.conv.kernel[...], np.float64)

    def errors(qmodel):
        w, p = qmodel.model.conv.kernel[...], qmodel.qparams()[name]
        codes = np.asarray(qjax.numerics.quantize(w, p), np.float64)
        return ((codes * np.asarray(p.scale, np.float64) - real) ** 2).reshape(-1, 4).sum(0)

    chosen, calibrated = nnx.clone(net), nnx.clone(net)
    constraint.initialize(chosen)
    project(constraint, calibrated)
    assert np.all(np.asarray(constraint.norms(chosen)[name]) <= constraint.bounds[name] // (1 + plus))
    assert np.all(errors(chosen) < errors(calibrated))
    for step in range(0, 33, every):
        other = nnx.clone(net)
        scale = other.quantizers[name].log2_scale
        scale[...] = scale[...] + np.float32(step / 8)
        project(constraint, other)
        assert np.all(errors(chosen) <= errors(other) * (1 + 1e-5))


def test_first_scales_that_fit_stay(net):
    qmodel = nnx.clone(net)
    constrain_accumulators(qmodel, X, 20).initialize(qmodel)
    assert np.array_equal(qmodel.model.conv.kernel[...], net.model.conv.kernel[...])
    assert jnp.array_equal(net.qparams()["conv/kernel"].scale, qmodel.qparams()["conv/kernel"].scale)


@pytest.mark.exhaustive
def test_a_compiled_step_serves_every_width(net):
    traces = []

    @nnx.jit
    def step(constraint: AccumulatorConstraint, qmodel: Any) -> None:
        traces.append(1)
        constraint.project(qmodel)

    for bits in (9, 8, 7):
        qmodel = nnx.clone(net)
        constraint = constrain_accumulators(qmodel, X, bits)
        step(constraint, qmodel)
        for name, codes in weight_codes(qmodel).items():
            norms = np.abs(codes.astype(np.int64)).sum(0)
            assert np.array_equal(np.asarray(constraint.norms(qmodel)[name]).reshape(2, -1), [norms, norms])
            assert norms.max() <= constraint.bounds[name]
    assert len(traces) == 1


class Grouped(nnx.Module):
    """A convolution in two groups, a product of activations, and a weight that is used twice."""

    def __init__(self):
        self.conv = nnx.Conv(2, 4, (2, 2), feature_group_count=2, rngs=nnx.Rngs(0))
        self.mix = nnx.Param(data(4, 4, seed=5))

    def __call__(self, x):
        y = nnx.relu(self.conv(x)).mean(axis=1)
        z = jnp.einsum("bic,bjc->bij", y, y)
        return z @ self.mix[...], y @ self.mix[...]


def test_groups_products_of_activations_and_two_uses():
    x = data(2, 4, 4, 2)
    qmodel = qjax.quantize(Grouped(), recipe(), x)
    constraint = constrain_accumulators(qmodel, x, 9, plus=True)
    assert set(constraint.bounds) == {"conv/kernel", "mix"}
    constraint.project(qmodel)
    assert qjax.accumulators(qjax.convert(qmodel, x)).bits == 9
    assert set(constrain_accumulators(qmodel, x, 9, only="conv/.*").bounds) == {"conv/kernel"}


# ---------------------------------------------------------------------------- the penalty


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plus", [False, True])
def test_penalty_is_the_excess_in_bits_and_pulls_the_right_way(net, plus):
    constraint = constrain_accumulators(net, X, 7, plus=plus)
    wanted = 0.0
    for name, layer in (("conv/kernel", net.model.conv), ("head/kernel", net.model.head)):
        w = np.asarray(layer.kernel[...], np.float64).reshape(-1, layer.kernel.shape[-1])
        steps = w / np.asarray(net.qparams()[name].scale, np.float64)
        bound = constraint.bounds[name]
        parts = [np.maximum(steps, 0), np.maximum(-steps, 0)] if plus else [np.abs(steps)]
        limit = bound / 2 if plus else bound
        wanted += sum(np.maximum(np.log2(part.sum(0) / limit), 0).sum() for part in parts)
    value, gradient = nnx.value_and_grad(constraint.penalty)(net)
    assert wanted > 1
    np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
    kernel, slope = net.model.conv.kernel[...], gradient["model"]["conv"]["kernel"][...]
    assert np.array_equal(np.sign(kernel), np.sign(slope))
    assert np.all(np.asarray(net.quantizers.named(gradient["quantizers"])["conv/kernel"]["log2_scale"]) < 0)


def test_no_penalty_within_the_bound(net):
    value, gradient = nnx.value_and_grad(constrain_accumulators(net, X, 20, plus=True).penalty)(net)
    assert float(value) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


# ---------------------------------------------------------------------------- refusals


class Transposed(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(data(4, 4))

    def __call__(self, x):
        return x @ self.w[...].T


class Scanned(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(data(2, 4, 4))

    def __call__(self, x):
        return jax.lax.scan(lambda x, w: (nnx.relu(x @ w), None), x, self.w[...])[0]


@pytest.mark.parametrize(
    ("make", "recipe_", "shape", "message"),
    [
        (Transposed, recipe(), (3, 4), "transforms it before it is used"),
        (Scanned, recipe(), (3, 4), "stacked for a scan"),
        (Net, recipe(weight_method="dynamic"), (2, 6, 6, 2), "its scale follows it"),
        (
            lambda: nnx.Linear(8, 3, rngs=nnx.Rngs(0)),
            qjax.Recipe(weights=qjax.QSpec(axis=-1, group_size=4, group_axis=0)),
            (3, 8),
            "groups of scales",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:quantize. a part of the recipe")
def test_what_cannot_be_projected_is_refused(make, recipe_, shape, message):
    qmodel = qjax.quantize(make(), recipe_, data(*shape))
    with pytest.raises(ValueError, match=message):
        constrain_accumulators(qmodel, data(*shape), 12)


def test_a_register_for_nothing_and_a_name_of_nothing(net):
    with pytest.raises(ValueError, match=r"holds one product, got 4 bits for activations of 4"):
        constrain_accumulators(net, X, 4)
    with pytest.raises(ValueError, match=r"matches no weight of a sum. Weights: conv/kernel, head/kernel"):
        constrain_accumulators(net, X, 12, only="body/.*")
