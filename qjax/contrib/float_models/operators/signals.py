"""Fourier transforms and windows."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, operator
from qjax.contrib.float_models.operators.elementwise import cast_to, type_of


@operator("DFT", static=(1, 2))
def _dft(call: Call, x: Any, length: Any = None, axis: Any = None) -> Any:
    """Complex numbers are pairs along the last axis; one number is a real one."""
    default = -2 if call.version >= 20 else 1
    given = call.get("axis", default) if axis is None else int(np.reshape(axis, ()))
    axis = given % x.ndim
    size = x.shape[axis] if length is None else int(np.reshape(length, ()))
    inverse, half = bool(call.get("inverse", 0)), bool(call.get("onesided", 0))
    if length is None and inverse and half:
        size = 2 * (size - 1)
    if inverse and half:
        z = lax.complex(x[..., 0], x[..., 1])
        return jnp.expand_dims(jnp.fft.irfft(z, size, axis), -1)
    if half:
        z = jnp.fft.rfft(x[..., 0], size, axis)
    else:
        z = x[..., 0] if x.shape[-1] == 1 else lax.complex(x[..., 0], x[..., 1])
        z = (jnp.fft.ifft if inverse else jnp.fft.fft)(z, size, axis)
    return jnp.stack([jnp.real(z), jnp.imag(z)], -1)


def _window(name: str, weights: tuple[float, ...]) -> None:
    """weights: of cos(2 pi k n / N) for k = 0, 1, ..."""

    @operator(name, static=(0,), in_numpy=True)
    def apply(call: Call, size: Any) -> Any:
        size = int(np.reshape(size, ()))
        turns = 2 * np.pi * np.arange(size) / (size if call.get("periodic", 1) else size - 1)
        y = sum(w * np.cos(k * turns) for k, w in enumerate(weights))
        return cast_to(call, np.asarray(y), type_of(call, call.get("output_datatype", 1)))


_window("HannWindow", (0.5, -0.5))
_window("HammingWindow", (25 / 46, -21 / 46))
_window("BlackmanWindow", (0.42, -0.5, 0.08))
