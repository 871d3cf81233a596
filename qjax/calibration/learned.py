"""Quantizers that train: which numbers they learn, and how those become a scale and a zero point.

| method | learned | source |
| --- | --- | --- |
| `lsq` | log2 of the scale | Esser et al. 2020 (arXiv 1902.08153) |
| `lsq_plus` | log2 of the scale, the zero point | Bhalgat et al. 2020 (arXiv 2004.09576) |
| `pact` | the clipping value alpha | Choi et al. 2018 (arXiv 1805.06085) |
| `tqt` | log2 of the threshold; scales are powers of two | Jain et al. 2020 (arXiv 1903.08066) |
| `static` | nothing: calibrated once | |
| `dynamic` | nothing: the range of the tensor at every step (weights only) | |

Scales are learned as logarithms, so no step of an optimizer can make one zero or negative; the gradient of the
scale itself is the paper's.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import QParams, QSpec, broadcast_to_tensor, choose_qparams, split_groups
from qjax.numerics.fake_quant import Gradient, fake_quant_codes, lsq_gradient_scale
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.learned_scale import learned_scale, log2_scale_of, pact_scale, power_of_two_scale
from qjax.numerics.packing import packed, unpacked
from qjax.numerics.rounding import Rounding
from qjax.ops import Quantized

Method = Literal["lsq", "lsq_plus", "pact", "tqt", "static", "dynamic"]

_LEARNED: dict[str, tuple[str, ...]] = {
    "lsq": ("log2_scale",),
    "lsq_plus": ("log2_scale", "zero_point"),
    "pact": ("alpha",),
    "tqt": ("log2_threshold",),
    "static": (),
    "dynamic": (),
}


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """The static side of one quantizer; its numbers are a dict of arrays that is passed in.

    spec: the codes. method: what is learned. shape: of the tensor (activations: of one example, without the
    batch). stack: lengths of the scans that the tensor lives in; parameters have these axes in front. fixed: the scale
    and zero point, where neither calibration nor training chooses them ("static").
    """

    spec: QSpec
    method: Method
    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    fixed: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"Unknown method {self.method!r}. Expected one of {', '.join(get_args(Method))}.")

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the parameters that an optimizer may move."""
        return _LEARNED[self.method]

    @property
    def gradient(self) -> Gradient:
        """The rule of `fake_quant_codes`."""
        return {"pact": "pact", "static": "ste", "dynamic": "ste"}.get(self.method, "lsq")  # pyright: ignore[reportReturnType]

    def init(self, qparams: QParams) -> dict[str, np.ndarray]:
        """Parameters that start from calibrated ones (leading axes of `stack` included, if any)."""
        scale, zero_point = np.asarray(qparams.scale), np.asarray(qparams.zero_point)
        if self.fixed is not None:
            scale, zero_point = (
                np.full_like(a, value) for a, value in zip((scale, zero_point), self.fixed, strict=True)
            )
        match self.method:
            case "lsq":
                return {"log2_scale": log2_scale_of(scale), "zero_point": zero_point}
            case "lsq_plus":
                return {"log2_scale": log2_scale_of(scale), "zero_point": zero_point.astype(np.float32)}
            case "pact":
                return {"alpha": scale * np.float32(self.spec.qmax - self.spec.qmin)}
            case "tqt":
                threshold = log2_scale_of(scale) + np.float32(math.log2(self._tqt_levels))
                return {"log2_threshold": threshold.astype(np.float32), "zero_point": zero_point}
            case "static":
                return {"scale": scale, "zero_point": zero_point}
            case _:
                return {}

    @property
    def _tqt_levels(self) -> int:
        return 2 ** (self.spec.bits - 1) if self.spec.signed else 2**self.spec.bits

    def qparams(self, params: dict[str, Any], x: jax.Array | None = None) -> QParams:
        """Scale and zero point; the same bits in eager and under jit. `x`: the tensor, for "dynamic"."""
        spec = self.spec
        match self.method:
            case "lsq" | "lsq_plus":
                scale = params["scale"] if "scale" in params else learned_scale(params["log2_scale"])
                return QParams(scale, params["zero_point"], spec)
            case "pact":
                scale = pact_scale(params["alpha"], spec.qmax - spec.qmin)
                return QParams(scale, jnp.full(scale.shape, spec.qmin, jnp.int32), spec)
            case "tqt":
                scale = power_of_two_scale(params["log2_threshold"], spec.qmax)
                return QParams(scale, params["zero_point"], spec)
            case "static":
                return QParams(params["scale"], params["zero_point"], spec)
            case _:
                assert x is not None
                view, axes = split_groups(lax.stop_gradient(x).astype(jnp.float32), spec)
                return choose_qparams(jnp.min(view, axes), jnp.max(view, axes), spec)

    def __call__(
        self,
        params: dict[str, Any],
        x: jax.Array,
        quantization: InputQuantization = "reciprocal",
        key: jax.Array | None = None,
    ) -> Quantized:
        """Put a tensor on the grid; `quantization`: by whose formula; `key`: round stochastically, see `Rounding`."""
        spec = self.spec
        qparams = self.qparams(params, x)
        scale = broadcast_to_tensor(qparams.scale, spec, x.shape)
        zero_point = broadcast_to_tensor(qparams.zero_point, spec, x.shape)
        if spec.per_tensor:
            scale, zero_point = scale.reshape((1,) * x.ndim), zero_point.reshape((1,) * x.ndim)
        sharing = max(1, math.prod(self.shape) // max(1, math.prod(np.shape(qparams.scale))))
        codes = fake_quant_codes(
            x,
            scale,
            zero_point,
            spec.qmin,
            spec.qmax,
            gradient=self.gradient,
            gradient_scale=lsq_gradient_scale(sharing, spec.qmax) if self.learned else 1.0,
            rounding=Rounding.NEAREST_EVEN if key is None else Rounding.STOCHASTIC,
            key=key,
            quantization=quantization,
        )
        return Quantized(codes, lax.stop_gradient(scale), qparams, x.dtype)


def with_scales(quantizers: Mapping[str, Quantizer], values: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters with every learned "log2_scale" turned into its "scale".

    All in one vector: one small computation a step instead of one per quantizer.
    """
    names = [name for name, q in quantizers.items() if "log2_scale" in q.learned]
    names.sort(key=lambda name: jnp.size(values[name]["log2_scale"]))
    ready = dict(values)
    if not names:
        return ready
    raw = [values[name]["log2_scale"] for name in names]
    parts = unpacked(learned_scale(packed(raw)), [jnp.shape(r) for r in raw])
    for name, part in zip(names, parts, strict=True):
        ready[name] = {"scale": part, **{k: v for k, v in values[name].items() if k != "log2_scale"}}
    return ready
