"""QSpec and QParams: what they mean, what they refuse, and in which words."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.affine import QParams, QSpec, broadcast_to_tensor, split_groups


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize(
    ("signed", "symmetric", "narrow"),
    list(itertools.product((True, False), (True, False), (None, True, False))),
)
def test_the_codes_are_those_of_the_words(bits, signed, symmetric, narrow):
    if symmetric and not signed and narrow:
        with pytest.raises(ValueError, match="narrow_range drops the lowest code, the zero"):
            QSpec(bits, signed, symmetric, narrow)
        return
    spec = QSpec(bits, signed, symmetric, narrow)
    codes = np.arange(2**bits) - (2 ** (bits - 1) if signed else 0)
    if narrow or (narrow is None and symmetric and signed):
        codes = codes[1:]
    assert (spec.qmin, spec.qmax, spec.levels) == (codes[0], codes[-1], codes.size)
    assert spec.dtype == (np.int16 if bits > 8 else np.int8 if signed else np.uint8) or not signed
    assert np.iinfo(spec.dtype).min <= spec.qmin
    assert spec.qmax <= np.iinfo(spec.dtype).max
    assert spec.dtype.itemsize == (1 if bits <= 8 else 2)


def test_two_bits_and_the_default():
    assert (QSpec(bits=2).qmin, QSpec(bits=2).qmax) == (-1, 1)
    assert (QSpec().qmin, QSpec().qmax, QSpec().dtype) == (-127, 127, np.int8)
    activations = QSpec(symmetric=False)
    assert (activations.qmin, activations.qmax) == (-128, 127)
    assert QSpec().replace(symmetric=False) == activations
    assert QSpec(narrow_range=False).replace(bits=4).qmin == -8
    assert hash(QSpec(axis=[0, 1])) == hash(QSpec(axis=(0, 1)))  # pyright: ignore[reportArgumentType]
    assert QSpec(axis=(3,)) == QSpec(axis=3)
    assert QSpec(axis=()).per_tensor


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bits": 1}, ValueError, r"bits must lie in 2\.\.16\. Got 1"),
        ({"bits": 17}, ValueError, "Got 17"),
        ({"bits": 8.0}, TypeError, r"bits must be an integer\. Got 8\.0"),
        ({"bits": True}, TypeError, "bits must be an integer"),
        ({"signed": 1}, TypeError, "signed must be True or False"),
        ({"axis": "c"}, TypeError, "axis must be an integer"),
        ({"group_size": 0}, ValueError, "group_size must be at least 1"),
        ({"group_axis": 1}, ValueError, "group_axis needs group_size"),
    ],
)
def test_a_bad_spec_says_what_was_expected(arguments, error, words):
    with pytest.raises(error, match=words):
        QSpec(**arguments)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (QSpec(), (3, 3, 8, 16), ()),
        (QSpec(axis=-1), (3, 3, 8, 16), (16,)),
        (QSpec(axis=(-1, 0)), (3, 5, 8, 16), (3, 16)),
        (QSpec(axis=-1, group_size=32), (128, 64), (4, 64)),
        (QSpec(group_size=4, group_axis=-1), (3, 8), (2,)),
        (QSpec(axis=0, group_size=2, group_axis=-2), (5, 7, 6, 3), (5, 3)),
    ],
)
def test_broadcasting_and_reducing_are_inverse(spec, shape, expected):
    """Every element carries the parameter of its slice: reducing the broadcast parameters gives them back."""
    assert spec.param_shape(shape) == expected
    param = np.arange(np.prod(expected, dtype=int), dtype=np.float32).reshape(expected)
    full = np.broadcast_to(np.asarray(broadcast_to_tensor(jnp.asarray(param), spec, shape)), shape)
    view, axes = split_groups(full, spec)
    assert np.array_equal(view.max(axes), param)
    assert np.array_equal(view.min(axes), param)


def test_groups_are_consecutive():
    spec = QSpec(group_size=3, group_axis=1)
    scale = broadcast_to_tensor(jnp.array([1.0, 2.0]), spec, (1, 6))
    assert np.array_equal(np.asarray(scale), [[1, 1, 1, 2, 2, 2]])


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (QSpec(axis=4), (2, 3), "axis 4 is out of range for a tensor of 2 dimensions"),
        (QSpec(axis=(1, -1)), (2, 3), "name one axis twice"),
        (QSpec(axis=0, group_size=1), (2, 3), "name one axis twice"),
        (
            QSpec(group_size=4),
            (6, 3),
            r"must divide the size of axis 0 of a tensor of shape \(6, 3\)\. Got 4",
        ),
    ],
)
def test_a_spec_that_does_not_fit_the_tensor(spec, shape, words):
    with pytest.raises(ValueError, match=words):
        spec.param_shape(shape)


def test_parameters_of_another_shape():
    qparams = QParams(np.ones(3), np.zeros(3, int), QSpec(axis=0))
    with pytest.raises(ValueError, match=r"shape \(4,\) are needed .* Got shape \(3,\)"):
        broadcast_to_tensor(qparams.scale, qparams.spec, (4, 2))


ASYMMETRIC = QSpec(symmetric=False)


@pytest.mark.parametrize(
    ("scale", "zero_point", "spec", "error", "words"),
    [
        (0.0, 0, QSpec(), ValueError, r"finite, positive .* Got 0\.0"),
        (-1.0, 0, QSpec(), ValueError, "positive"),
        (np.nan, 0, QSpec(), ValueError, "Got nan"),
        (np.inf, 0, QSpec(), ValueError, "Got inf"),
        (1e-31, 0, QSpec(), ValueError, "2\\^-100"),
        (1e300, 0, QSpec(), ValueError, "finite"),
        (np.array([1.0, 0.0]), np.zeros(2, int), QSpec(axis=0), ValueError, "1 of 2 out of range"),
        (1.0, 1, QSpec(), ValueError, "a symmetric spec needs zero_point 0"),
        (1.0, 128, ASYMMETRIC, ValueError, r"in \[-128, 127\]\. Got 128"),
        (1.0, 2**40, ASYMMETRIC, ValueError, "does not fit into int32"),
        (1.0, np.nan, ASYMMETRIC, ValueError, "a learned zero_point must be finite"),
        (1.0, True, ASYMMETRIC, TypeError, "Got dtype bool"),
        (np.ones(2), 0, QSpec(axis=0), ValueError, r"one shape\. Got \(2,\) and \(\)"),
        (1j, 0, QSpec(), TypeError, "Expected real numbers"),
        (1.0, 0, 8, TypeError, "spec must be a QSpec"),
    ],
)
def test_concrete_parameters_are_checked(scale, zero_point, spec, error, words):
    with pytest.raises(error, match=words):
        QParams(scale, zero_point, spec)


def test_qparams_is_a_pytree_with_a_static_spec():
    qparams = QParams(np.float64(0.1), np.int8(3), ASYMMETRIC)
    assert (qparams.scale.dtype, qparams.zero_point.dtype) == (jnp.float32, jnp.int32)
    leaves, tree = jax.tree.flatten(qparams)
    assert [leaf.shape for leaf in leaves] == [(), ()]
    assert jax.tree.unflatten(tree, leaves).spec is ASYMMETRIC
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(qparams)]
    assert paths == [".scale", ".zero_point"]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), qparams)
    scales = jax.vmap(lambda q: q.scale * 2.0)(stacked)
    assert np.array_equal(np.asarray(scales), np.full(2, np.float32(0.1) * 2))
    assert jax.eval_shape(lambda q: q, qparams).scale.shape == ()
    assert jax.jit(lambda q: q.replace(scale=q.scale + 1.0))(qparams).spec == ASYMMETRIC


def test_a_learned_zero_point_is_rounded_half_to_even_and_clipped():
    spec = QSpec(bits=4, symmetric=False, axis=0)
    latent = np.array([0.5, 1.5, -2.5, 100.0, -100.0], np.float32)
    qparams = QParams(np.ones(5), latent, spec)
    assert np.array_equal(np.asarray(qparams.integer_zero_point()), [0, 2, -2, 7, -8])
