"""One quantizer: its codes, its estimator (`calibration.estimators`), and the tensor that it belongs to."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.calibration.estimators import LSQ, Estimator, estimator
from qjax.numerics.affine import QParams, QSpec, broadcast_to_tensor
from qjax.numerics.calls import traced_once
from qjax.numerics.fake_quant import fake_quant_codes, lsq_gradient_scale
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.learned_scale import learned_scale
from qjax.numerics.packing import packed, unpacked
from qjax.numerics.qparams import zero_point_for
from qjax.numerics.rounding import Rounding
from qjax.ops import Quantized

Method: TypeAlias = Literal["lsq", "lsq_plus", "pact", "tqt", "static", "dynamic", "absmean"] | Estimator
"""How a quantizer learns: a name of `calibration.estimators()`, or an estimator of your own."""


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The static side of one quantizer; its numbers are passed in as a dict of arrays.

    spec: the codes. method: the estimator, or its name. shape: of the tensor (activations: of one example, without the
    batch). stack: lengths of the scans around the tensor; parameters have these axes in front. fixed: the scale and
    zero point, if neither calibration nor training chooses them ("static").
    """

    spec: QSpec
    method: Method
    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    fixed: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        estimator(self.method)

    @property
    def estimator(self) -> Estimator:
        """The estimator, which defines what is learned and by which gradient."""
        return estimator(self.method)

    @property
    def follows_tensor(self) -> bool:
        """Whether the scale follows the tensor at every step, so that there are no parameters."""
        return self.estimator.follows_tensor

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the parameters that an optimizer may move."""
        return self.estimator.learned

    @property
    def takes_scale(self) -> bool:
        """Whether `qparams` accepts a "scale" instead of its "log2_scale", as LSQ's does."""
        return type(self.estimator).qparams is LSQ.qparams

    def init(self, qparams: QParams) -> dict[str, np.ndarray]:
        """Initial parameters from calibrated ones, including the leading axes of `stack`."""
        scale, zero_point = np.asarray(qparams.scale), np.asarray(qparams.zero_point)
        if self.fixed is not None:
            scale, zero_point = (
                np.full_like(a, value) for a, value in zip((scale, zero_point), self.fixed, strict=True)
            )
        return self.estimator.init(self.spec, scale, zero_point)

    def qparams(self, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        """Scale and zero point; the same bits in eager mode and under jit. `x`: the tensor, if the scale follows it."""
        return self.estimator.qparams(self.spec, params, x)

    def __call__(
        self,
        params: dict[str, Any],
        x: jax.Array,
        quantization: InputQuantization = "reciprocal",
        key: jax.Array | None = None,
    ) -> Quantized:
        """Quantize a tensor. `quantization`: the runtime's formula. `key`: rounds stochastically, see `Rounding`."""
        return _quantize(self, quantization, params, x, key)


@traced_once(0, 1)
def _quantize(
    quantizer: Quantizer,
    quantization: InputQuantization,
    params: Mapping[str, Any],
    x: jax.Array,
    key: jax.Array | None,
) -> Quantized:
    spec = quantizer.spec
    qparams = quantizer.qparams(params, x)
    scale = broadcast_to_tensor(qparams.scale, spec, x.shape)
    zero_point = zero_point_for(qparams, x.shape)
    if spec.per_tensor:
        scale, zero_point = scale.reshape((1,) * x.ndim), zero_point.reshape((1,) * x.ndim)
    sharing = max(1, math.prod(quantizer.shape) // max(1, math.prod(np.shape(qparams.scale))))
    codes = fake_quant_codes(
        x,
        scale,
        zero_point,
        spec.qmin,
        spec.qmax,
        gradient=quantizer.estimator.gradient,
        gradient_scale=lsq_gradient_scale(sharing, spec.qmax) if quantizer.learned else 1.0,
        rounding=Rounding.NEAREST_EVEN if key is None else Rounding.STOCHASTIC,
        key=key,
        quantization=quantization,
        elementwise_scale=params.get("elementwise_scale"),
    )
    return Quantized(codes, lax.stop_gradient(scale), qparams, x.dtype)


def with_scales(quantizers: Mapping[str, Quantizer], values: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters with every "log2_scale" of LSQ converted to its "scale".

    All are in one vector, so there is one small computation per step instead of one per quantizer.
    """
    names = [name for name, q in quantizers.items() if q.takes_scale]
    names.sort(key=lambda name: jnp.size(values[name]["log2_scale"]))
    ready = dict(values)
    if not names:
        return ready
    raw = [values[name]["log2_scale"] for name in names]
    parts = unpacked(learned_scale(packed(raw)), [jnp.shape(r) for r in raw])
    for name, part in zip(names, parts, strict=True):
        ready[name] = {"scale": part, **{k: v for k, v in values[name].items() if k != "log2_scale"}}
    return ready
