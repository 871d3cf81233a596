"""The numbers of a quantized tensor, scale and zero point, which are checked unless they are traced."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import traced
from qjax.numerics.qspec import QSpec

SCALE_MIN = 2.0**-100
"""The smallest scale accepted: far above the subnormals, which XLA flushes to zero and numpy does not."""
SCALE_MAX = 2.0**100
"""The largest scale accepted: its reciprocal is far above the subnormals too."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, init=False)
class QParams:
    """Scale and zero point of a tensor, with the spec that they belong to. A pytree; `spec` is static.

    Args:
      scale: float32, of shape `spec.param_shape(tensor.shape)`, in [2^-100, 2^100]; other floats are rounded to
        float32.
      zero_point: int32 of the same shape, in [qmin, qmax]; 0 where symmetric. A float zero point is a learned latent:
        it is rounded half to even and clipped wherever it is used.
      spec: the `QSpec`.

    Concrete values are checked when a QParams is made; traced ones cannot be.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> qparams = qjax.QParams(np.float32(0.5), 0, qjax.QSpec(bits=4))
      >>> print(qjax.numerics.quantize(np.float32([0.2, 0.3, 9.0]), qparams))
      [0 1 7]
    """

    scale: jax.Array
    zero_point: jax.Array
    spec: QSpec

    def __init__(self, scale: ArrayLike, zero_point: Any, spec: QSpec) -> None:
        if not isinstance(spec, QSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"QParams: spec must be a QSpec. Got {type(spec).__name__}")
        scale, zero_point = as_float32(scale), _zero_point(zero_point)
        if scale.shape != zero_point.shape:
            raise ValueError(
                f"QParams: scale and zero_point must have one shape. Got {scale.shape} and {zero_point.shape}"
            )
        if isinstance(scale, np.ndarray):
            _check_scale(scale)
        if isinstance(zero_point, np.ndarray):
            _check_zero_point(zero_point, spec)
        object.__setattr__(self, "scale", jnp.asarray(scale))
        object.__setattr__(self, "zero_point", jnp.asarray(zero_point))
        object.__setattr__(self, "spec", spec)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], QSpec]:
        key = jax.tree_util.GetAttrKey
        return ((key("scale"), self.scale), (key("zero_point"), self.zero_point)), self.spec

    def tree_flatten(self) -> tuple[tuple[Any, Any], QSpec]:
        return (self.scale, self.zero_point), self.spec

    @classmethod
    def tree_unflatten(cls, aux: QSpec, children: tuple[Any, Any]) -> "QParams":
        # JAX rebuilds pytrees with placeholders and with batched leaves, which the checks would refuse.
        self = object.__new__(cls)
        for name, value in zip(("scale", "zero_point", "spec"), (*children, aux), strict=True):
            object.__setattr__(self, name, value)
        return self

    def replace(self, **changes: Any) -> "QParams":
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def integer_zero_point(self) -> jax.Array:
        """The zero point as int32 codes: a float latent is rounded half to even and clipped."""
        return integer_zero_point(self.zero_point, self.spec.qmin, self.spec.qmax)


def integer_zero_point(zero_point: jax.Array, qmin: int, qmax: int) -> jax.Array:
    """int32 zero point of a latent float one: half to even, clipped to [qmin, qmax]; NaN counts as 0.

    An integer zero point is returned unchanged.
    """
    if jnp.issubdtype(zero_point.dtype, jnp.integer):
        return zero_point.astype(jnp.int32)
    latent = zero_point.astype(jnp.float32)
    latent = jnp.where(jnp.isnan(latent), jnp.zeros_like(latent), latent)
    return jnp.clip(jnp.round(latent), np.float32(qmin), np.float32(qmax)).astype(jnp.int32)


def broadcast_to_tensor(param: jax.Array, spec: QSpec, shape: tuple[int, ...]) -> jax.Array:
    """`param`, reshaped to broadcast against a tensor of `shape`: same number of dimensions.

    Per tensor (1, 1, ...); per channel (1, ..., n, ..., 1); with groups each scale is repeated over its
    group, so the group axis has its full size. Differentiable: the gradient of a repeated scale is the sum
    over its group.
    """
    expected = spec.param_shape(shape)
    if tuple(param.shape) != expected:
        raise ValueError(
            f"Parameters of shape {expected} are needed for a tensor of shape {shape} under {spec}. "
            f"Got shape {tuple(param.shape)}"
        )
    sizes = spec.param_sizes(shape)
    if spec.group_size is None:
        return jnp.reshape(param, sizes)
    after = spec.group_axis % len(shape) + 1
    split = jnp.reshape(param, (*sizes[:after], 1, *sizes[after:]))
    repeated = jnp.broadcast_to(split, (*sizes[:after], spec.group_size, *sizes[after:]))
    return jnp.reshape(repeated, (*sizes[: after - 1], shape[after - 1], *sizes[after:]))


def zero_point_for(qparams: QParams, shape: tuple[int, ...]) -> jax.Array:
    """The zero point in a shape that broadcasts against a tensor of that shape, as from `broadcast_to_tensor`.

    For a symmetric spec it is the constant 0, so that the bounds of the codes are two numbers, and not vectors that
    every element reads.
    """
    if qparams.spec.symmetric and jnp.issubdtype(qparams.zero_point.dtype, jnp.integer):
        return jnp.zeros((1,) * len(shape), jnp.int32)
    return broadcast_to_tensor(qparams.zero_point, qparams.spec, shape)


def as_float32(value: Any) -> jax.Array | np.ndarray:
    """A traced value as a float32 tracer, a concrete one as a numpy array to check."""
    array = value if traced(value) else np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"Expected real numbers. Got dtype {array.dtype}")
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore"):  # It becomes an infinity, which the checks refuse by name.
            return array.astype(np.float32)
    return array.astype(jnp.float32)


def _zero_point(value: Any) -> jax.Array | np.ndarray:
    """An integer zero point as int32, a float latent as float32; concrete ones as numpy arrays."""
    array = value if traced(value) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"QParams: zero_point must be integers (or a learned float). Got dtype {array.dtype}")
    if isinstance(array, np.ndarray) and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError("QParams: zero_point does not fit into int32")
    return array.astype(np.int32)


def _check_scale(scale: np.ndarray) -> None:
    bad = ~((scale >= SCALE_MIN) & (scale <= SCALE_MAX))
    if bad.any():
        raise ValueError(
            f"QParams: scale must be finite, positive and in [2^-100, 2^100]. Got {scale[bad].flat[0]}"
            f" ({int(bad.sum())} of {scale.size} out of range)"
        )


def _check_zero_point(zero_point: np.ndarray, spec: QSpec) -> None:
    if np.issubdtype(zero_point.dtype, np.floating):
        if not np.isfinite(zero_point).all():
            raise ValueError("QParams: a learned zero_point must be finite")
        return
    if spec.symmetric and zero_point.any():
        raise ValueError(f"QParams: a symmetric spec needs zero_point 0. Got {zero_point}; use symmetric=False")
    bad = (zero_point < spec.qmin) | (zero_point > spec.qmax)
    if bad.any():
        raise ValueError(
            f"QParams: zero_point must be a code, in [{spec.qmin}, {spec.qmax}]. Got {zero_point[bad].flat[0]}"
        )
