"""What holds for every observer: purity, constant size, transformations, channels, groups, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.calibration import MSE, Callback, Entropy, MinMax, MovingAverage, Observer, Percentile, get, names
from qjax.calibration.observer import State
from qjax.numerics.affine import QSpec

OBSERVERS = [
    MinMax(),
    MovingAverage(0.9),
    Percentile(99.0, bins=64),
    MSE(bins=64),
    Entropy(bins=64),
    Callback(lambda batch: (batch.min(), batch.max())),
]
CHANNEL_OBSERVERS = OBSERVERS[:-1]
SPECS = [QSpec(), QSpec(bits=4, symmetric=False), QSpec(bits=3, signed=False, symmetric=False)]


def by_name(observer: Observer) -> str:
    return observer.name


def equal(a: object, b: object) -> bool:
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    same = all(np.array_equal(p, q) and p.dtype == q.dtype for p, q in zip(left, right, strict=True))
    return same and jax.tree.structure(a) == jax.tree.structure(b)


def batches(shape: tuple[int, ...], n: int = 5, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 2)).astype(np.float32) for _ in range(n)]


@functools.partial(jax.jit, static_argnums=(0, 3))
def step(observer: Observer, state: State, x: jax.Array, spec: QSpec) -> State:
    return observer.update(state, x, spec)


def run(observer: Observer, spec: QSpec, data: list[np.ndarray]) -> State:
    state = observer.init(spec, data[0].shape)
    for x in data:
        state = step(observer, state, jnp.asarray(x), spec)
    return state


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.sampled(4)
def test_eager_jit_scan_agree_and_the_state_keeps_its_size(observer: Observer, spec: QSpec) -> None:
    data = batches((6, 10), 3)
    start = observer.init(spec, data[0].shape)
    sizes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), start)
    eager = jitted = start
    for x in data:
        eager = observer.update(eager, jnp.asarray(x), spec)
        jitted = step(observer, jitted, jnp.asarray(x), spec)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), eager) == sizes
    scanned, _ = jax.lax.scan(lambda s, x: (observer.update(s, x, spec), None), start, jnp.stack(data))
    assert equal(eager, jitted)
    assert equal(eager, scanned)
    assert equal(observer.qparams(eager, spec), observer.qparams(scanned, spec))


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
@pytest.mark.sampled(2)
def test_vmap_is_a_loop(observer: Observer) -> None:
    spec, data = QSpec(symmetric=False), [jnp.stack(batches((20,), 3, seed)) for seed in range(4)]
    start = observer.init(spec, (20,))
    looped = []
    for i in range(3):
        looped.append(run(observer, spec, [np.asarray(x[i]) for x in data]))
    mapped = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *leaf.shape)), start)
    for x in data:
        mapped = jax.jit(jax.vmap(lambda s, b: observer.update(s, b, spec)))(mapped, x)
    assert equal(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *looped))


@pytest.mark.parametrize("observer", CHANNEL_OBSERVERS, ids=by_name)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [-1, (0, 2)])
@pytest.mark.sampled(2)
def test_per_channel_is_a_loop_per_tensor(observer: Observer, symmetric: bool, axis: int | tuple[int, ...]) -> None:
    spec, data = QSpec(bits=4, symmetric=symmetric, axis=axis), batches((2, 8, 3), 3)
    got = observer.qparams(run(observer, spec, data), spec)
    whole = spec.replace(axis=None)
    axes = tuple(a % 3 for a in ((axis,) if isinstance(axis, int) else axis))
    for index in np.ndindex(got.scale.shape):
        at = [slice(None)] * 3
        for a, i in zip(axes, index, strict=True):
            at[a] = i
        part = [x[tuple(at)] for x in data]
        one = observer.qparams(run(observer, whole, part), whole)
        assert np.array_equal(got.scale[index], one.scale)
        assert np.array_equal(got.zero_point[index], one.zero_point)


@pytest.mark.exhaustive
@pytest.mark.parametrize("observer", CHANNEL_OBSERVERS, ids=by_name)
def test_per_group_is_a_loop_per_tensor(observer: Observer) -> None:
    spec, data = QSpec(bits=4, axis=-1, group_size=4, group_axis=0), batches((12, 3))
    got = observer.qparams(run(observer, spec, data), spec)
    assert got.scale.shape == (3, 3)
    for g, c in np.ndindex(3, 3):
        part = [x[4 * g : 4 * g + 4, c] for x in data]
        one = observer.qparams(run(observer, QSpec(bits=4), part), QSpec(bits=4))
        assert np.array_equal(got.scale[g, c], one.scale)


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
def test_the_batch_size_may_change(observer: Observer) -> None:
    spec = QSpec()
    state = observer.init(spec, (8, 3))
    for n in (8, 8, 2):
        state = step(observer, state, jnp.ones((n, 3), jnp.float32), spec)
    assert np.array_equal(observer.qparams(state, spec).scale, np.float32(1 / 127))


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.sampled(3)
def test_half_precision_is_observed_as_its_float32_values(observer: Observer, dtype: jnp.dtype) -> None:
    spec, x = QSpec(symmetric=False), jnp.asarray(batches((50,), 1)[0]).astype(dtype)
    start = observer.init(spec, x.shape)
    assert equal(step(observer, start, x, spec), step(observer, start, x.astype(jnp.float32), spec))


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
@pytest.mark.sampled(2)
def test_the_users_64_bit_flag_changes_nothing(observer: Observer) -> None:
    spec, data = QSpec(symmetric=False), batches((30,))
    with jax.enable_x64(True):
        jitted = run(observer, spec, data)
        eager = observer.init(spec, (30,))
        for x in data:
            eager = observer.update(eager, jnp.asarray(x), spec)
    assert equal(eager, run(observer, spec, data))
    assert equal(eager, jitted)


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
@pytest.mark.sampled(2)
def test_data_of_zeros_has_the_scale_of_an_empty_range(observer: Observer) -> None:
    for spec in SPECS:
        got = observer.qparams(run(observer, spec, [np.zeros((4, 4), np.float32)]), spec)
        assert np.array_equal(got.scale, np.float32(1.0))


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
def test_no_data_is_an_error(observer: Observer) -> None:
    with pytest.raises(ValueError, match=rf"observer '{observer.name}': expected at least one batch, got no data"):
        observer.qparams(observer.init(QSpec(), (4,)), QSpec())


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
def test_nan_and_infinity_are_counted_and_refused(observer: Observer) -> None:
    x = np.ones((2, 8), np.float32)
    x[0, :3], x[1, 0], x[1, 1] = np.nan, np.inf, -np.inf
    state = run(observer, QSpec(), [np.ones((2, 8), np.float32), x, x])
    with pytest.raises(ValueError, match=r"expected finite calibration data, got 6 NaN and 4 infinite of 48 values"):
        observer.qparams(state, QSpec())


@pytest.mark.parametrize("observer", OBSERVERS, ids=by_name)
def test_bad_batches_are_refused(observer: Observer) -> None:
    state = observer.init(QSpec(), (4,))
    with pytest.raises(TypeError, match=r"expected a floating tensor, got int32"):
        observer.update(state, jnp.ones((4,), jnp.int32), QSpec())
    with pytest.raises(ValueError, match=r"got shape \(0, 4\): drop the empty batch"):
        observer.update(state, jnp.ones((0, 4), jnp.float32), QSpec())


def test_get_by_name_and_by_value() -> None:
    assert names() == ("minmax", "moving_average", "percentile", "mse", "entropy")
    for name in names():
        assert get(name).name == name
        assert isinstance(get(name), Observer)
    mine = Percentile(99.0)
    assert get(mine) is mine
    assert get("percentile") == Percentile(99.99)


def test_get_of_something_else_says_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown observer 'max'. Did you mean 'minmax'\? Expected one of 'minmax'"):
        get("max")
    with pytest.raises(TypeError, match=r"make an instance of it"):
        get(MinMax)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"an object with name, init, update and qparams, got 3"):
        get(3)  # pyright: ignore[reportArgumentType]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"decay: expected a number in \[0, 1\), got 1.0"):
        MovingAverage(1.0)
    with pytest.raises(ValueError, match=r"bins: expected an even number from 16 to 65536, got 17"):
        MSE(bins=17)
    with pytest.raises(ValueError, match=r"percentile: expected a number in \(50, 100\], got 50"):
        Percentile(50.0)
