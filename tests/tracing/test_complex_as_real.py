"""Complex numbers as pairs of real ones: rotations, Fourier transforms, state spaces."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.tracing import from_jaxpr, rewrite

LENGTH, WIDTH, STATE = 6, 16, 8
RNG = np.random.default_rng(0)


def made(function, *args):
    """What the rewritten program of a function computes."""
    program = rewrite(from_jaxpr(jax.make_jaxpr(function)(*args)))
    env = dict(zip(program.inputs, args, strict=True))
    for eqn in program.equations:
        given = [env.get(value, value.constant) for value in eqn.inputs]
        env.update(zip(eqn.outputs, eqn.bind(*given), strict=True))
        assert not any(np.iscomplexobj(env[value]) for value in eqn.outputs)
    return [env.get(value, value.constant) for value in program.outputs]


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------------------- Fourier transforms


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("shape", [(8,), (7,), (1,), (2,), (2, 3), (4, 5), (3, 4, 2)])
@pytest.mark.sampled(3)
def test_fourier_transforms(shape, norm):
    axes = tuple(range(1, 1 + len(shape)))
    x, y = normal(3, *shape), normal(3, *shape)
    half = (*shape[:-1], shape[-1] // 2 + 1)
    u, v = normal(3, *half), normal(3, *half)

    def parts(z):
        return [jnp.real(z), jnp.imag(z)]

    cases = [
        (lambda a, b: parts(jnp.fft.fftn(lax.complex(a, b), axes=axes, norm=norm)), (x, y)),
        (lambda a, b: parts(jnp.fft.ifftn(lax.complex(a, b), axes=axes, norm=norm)), (x, y)),
        (lambda a, b: parts(jnp.fft.rfftn(a, axes=axes, norm=norm)), (x, y)),
        (lambda a, b: jnp.fft.irfftn(lax.complex(a, b), s=shape, axes=axes, norm=norm), (u, v)),
        (lambda a, b: parts(jnp.fft.fftshift(jnp.fft.fftn(a, axes=axes, norm=norm), axes=axes)), (x, y)),
    ]
    for function, given in cases:
        expected = jax.tree.leaves(function(*given))
        for found, right in zip(made(function, *given), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=2e-5)


# ---------------------------------------------------------------------------- arithmetic


def _imaginary(z):
    return jnp.real(z).astype(jnp.complex64) * np.complex64(1j)


ARITHMETIC = {
    "product": lambda z, w: z * w,
    "product with a real": lambda z, w: z * jnp.real(w).astype(jnp.complex64),
    "product with i": lambda z, w: z * np.complex64(1j),
    "imaginary numbers": lambda z, w: (
        _imaginary(z) * _imaginary(w) + jnp.exp(_imaginary(z)) / _imaginary(2 + jnp.abs(w))
    ),
    "lengths of imaginary numbers": lambda z, w: (
        jnp.abs(_imaginary(z)),
        jnp.real(_imaginary(z)),
        jnp.imag(jnp.real(z).astype(jnp.complex64)),
    ),
    "moves of imaginary numbers": lambda z, w: jnp.concatenate([_imaginary(z), w, _imaginary(w)], axis=1),
    "transforms of imaginary numbers": lambda z, w: (
        jnp.fft.fft(_imaginary(z)) + jnp.fft.irfft(_imaginary(w), n=4).astype(jnp.complex64)
    ),
    "quotient": lambda z, w: z / (w + np.complex64(3)),
    "quotient by a real": lambda z, w: z / (2 + jnp.abs(w)).astype(jnp.complex64),
    "power": lambda z, w: z**3 - jnp.square(w),
    "exponential": lambda z, w: jnp.exp(z) + w,
    "conjugate": lambda z, w: jnp.conj(z) * w,
    "matrices": lambda z, w: jnp.einsum("ij,ik->jk", z, w),
    "choice": lambda z, w: jnp.where(jnp.real(z) > 0, z, -w),
    "moves": lambda z, w: jnp.concatenate([jnp.flip(z, 1), jnp.roll(w, 1, 1)[:, ::2]], 1).T.reshape(2, 3, 3),
    "sums": lambda z, w: jnp.cumsum(z, axis=1) - jnp.sum(w, axis=1, keepdims=True),
    "padding": lambda z, w: jnp.pad(z, ((1, 0), (0, 2))),
    "a scan": lambda z, w: lax.scan(lambda c, x: (c * x + np.complex64(1j), c), w[0], z)[1],
    "a real carry": lambda z, w: lax.scan(lambda c, x: (c + jnp.abs(x), x * np.complex64(2j)), jnp.zeros(4), z),
    "remat": lambda z, w: jax.checkpoint(lambda a, b: a * jnp.conj(b))(z, w),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name):
    x, y = normal(3, 4), normal(3, 4)

    def function(a, b):
        out = jax.tree.leaves(ARITHMETIC[name](lax.complex(a, b), lax.complex(b + 1, a)))
        return [part for z in out for part in ((jnp.real(z), jnp.imag(z)) if jnp.iscomplexobj(z) else (z,))]

    with jax.numpy_rank_promotion("allow"):
        expected = function(x, y)
        program = rewrite(from_jaxpr(jax.make_jaxpr(function)(x, y)))
    assert not any(
        np.issubdtype(value.dtype, np.complexfloating)
        for eqn in program.walk()
        for value in (*eqn.inputs, *eqn.outputs)
        if not value.fixed and value.constant is None
    )
    if any(eqn.body is not None for eqn in program.equations):
        return  # what bodies compute is tested with models below
    for found, right in zip(made(function, x, y), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- models


class Complex(nnx.Module):
    """A layer, then a function of complex numbers with the parameters that these models have."""

    def __init__(self, function):
        rngs = nnx.Rngs(0)
        self.function = function
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        rng = np.random.default_rng(1)
        for name, shape in {
            "decay": (STATE,),
            "frequency": (STATE,),
            "into": (STATE, WIDTH, 2),
            "out_of": (WIDTH, STATE, 2),
            "filter": (2, 2, WIDTH, 2),
            "weights": (2, 3, WIDTH, WIDTH),
        }.items():
            setattr(self, name, nnx.Param(jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)))

    def rates(self):
        return jnp.exp(lax.complex(-jnp.exp(self.decay[...]), self.frequency[...]))

    def matrix(self, param):
        return lax.complex(param[..., 0], param[..., 1])

    def __call__(self, x):
        return self.last(self.function(self, self.first(x)))


def rotation(m, x):
    """Rotary embeddings by complex numbers, as Llama and WAN write them."""
    angle = jnp.outer(jnp.arange(LENGTH, dtype=jnp.float32), 100.0 ** -jnp.arange(0, 1, 0.25, dtype=jnp.float32))
    h = x.reshape(*x.shape[:2], 2, 4, 2)
    turned = lax.complex(h[..., 0], h[..., 1]) * jnp.exp(lax.complex(jnp.zeros_like(angle), angle))[None, :, None]
    return jnp.stack([jnp.real(turned), jnp.imag(turned)], axis=-1).reshape(x.shape)


def mixing(m, x):
    """FNet's tokens, https://arxiv.org/abs/2105.03824, section 3."""
    return jnp.real(jnp.fft.fft2(x, axes=(1, 2))) * 0.1 + x


def filtering(m, x):
    """A global filter, https://arxiv.org/abs/2107.00645, section 3.2."""
    f = jnp.fft.rfft2(x.reshape(-1, 2, 3, WIDTH), axes=(1, 2), norm="ortho")
    return jnp.fft.irfft2(f * m.matrix(m.filter)[None], s=(2, 3), axes=(1, 2), norm="ortho").reshape(x.shape)


def operator(m, x):
    """A Fourier neural operator in one dimension, https://arxiv.org/abs/2010.08895, section 4."""
    f = jnp.einsum("bki,kio->bko", jnp.fft.rfft(x, axis=1)[:, :3], lax.complex(m.weights[0], m.weights[1]))
    return jnp.fft.irfft(jnp.pad(f, ((0, 0), (0, 1), (0, 0))), n=LENGTH, axis=1)


def spectrogram(m, x):
    return jnp.concatenate([jnp.abs(jnp.fft.rfft(x, axis=-1)), x[..., :7]], axis=-1)


def state_space(m, x):
    """A linear recurrent unit by an associative scan, https://arxiv.org/abs/2303.06349."""
    rates = jnp.broadcast_to(m.rates()[None, None], (x.shape[0], LENGTH, STATE))
    driven = jnp.einsum("pd,bld->blp", m.matrix(m.into), x.astype(jnp.complex64))
    _, h = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (rates, driven), axis=1)
    return 2 * jnp.real(jnp.einsum("dp,blp->bld", m.matrix(m.out_of), h)) + x


def recurrence(m, x):
    """The same unit step by step: the carry of the scan is complex."""

    def step(h, u):
        h = m.rates()[None] * h + u.astype(jnp.complex64) @ m.matrix(m.into).T
        return h, 2 * jnp.real(h @ m.matrix(m.out_of).T)

    start = jnp.zeros((x.shape[0], STATE), jnp.complex64)
    return lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1) + x


def convolution(m, x):
    """A diagonal state space as a convolution by Fourier transforms, https://arxiv.org/abs/2206.11893."""
    powers = jnp.power(m.rates()[:, None], jnp.arange(LENGTH, dtype=jnp.complex64)[None])
    kernel = 2 * jnp.real(m.matrix(m.out_of) @ powers)
    f = jnp.fft.rfft(x, n=2 * LENGTH, axis=1) * jnp.fft.rfft(kernel.T, n=2 * LENGTH, axis=0)[None]
    return jnp.fft.irfft(f, n=2 * LENGTH, axis=1)[:, :LENGTH] + x


MODELS = [rotation, mixing, filtering, operator, spectrogram, state_space, recurrence, convolution]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:.*a single number")  # the imaginary part of a mean is 0
@pytest.mark.parametrize("function", MODELS)
def test_models(function):
    x = jax.random.normal(jax.random.key(0), (3, LENGTH, WIDTH))
    qmodel = qjax.quantize(Complex(function), qjax.Recipe(), x)
    graph = qjax.convert(qmodel, x)
    given = jax.random.normal(jax.random.key(0), (5, LENGTH, WIDTH)).at[:3].set(x)
    assert qjax.verify(graph, qmodel, [given]).local == 0
    np.testing.assert_array_equal(graph(given), nnx.jit(qjax.exact(qmodel, x))(qmodel, given))
    np.testing.assert_array_equal(graph.run(graph.quantize(x)), graph.native(3).run(graph.quantize(x)))

    def cosine(a, b):
        a, b = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]).astype(np.float64) for t in (a, b))
        return a @ b / np.sqrt((a @ a) * (b @ b))

    assert cosine(graph(x), qmodel.model(x)) > 0.998
    learned = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(qmodel)
    expected = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(qmodel.model)
    assert cosine(nnx.state(learned["model"]), nnx.state(expected)) > 0.95


class Spectrum(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.fft.rfft(self.first(x))


class OfSpectrum(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, z):
        return self.first(jnp.real(z))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "dtype"), [(Spectrum, jnp.float32), (OfSpectrum, jnp.complex64)])
def test_complex_results_and_arguments_are_refused_with_the_cure(model, dtype):
    x = jax.random.normal(jax.random.key(0), (3, LENGTH, WIDTH), dtype)
    with pytest.warns(UserWarning, match="convert will refuse it"):
        qmodel = qjax.quantize(model(), qjax.Recipe(), x)
    with pytest.raises(qjax.ConversionError, match=r"passed to the model here, or returned.*Pass and return jnp.real"):
        qjax.convert(qmodel, x)


def test_complex_parameters():
    class Filter(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.weights = nnx.Param(jnp.asarray(normal(4, WIDTH) + 1j * normal(4, WIDTH), jnp.complex64))

        def __call__(self, x):
            return jnp.fft.irfft(jnp.fft.rfft(self.first(x), axis=1) * self.weights[...][None], n=LENGTH, axis=1)

    x = jax.random.normal(jax.random.key(0), (3, LENGTH, WIDTH))
    qmodel = qjax.quantize(Filter(), qjax.Recipe(), x)
    assert qjax.verify(qjax.convert(qmodel, x), qmodel, [x]).exact
    gradient = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(qmodel)
    assert np.isfinite(np.asarray(gradient["model"]["weights"][...])).all()
