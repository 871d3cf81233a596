"""Gradient estimators: which numbers of a quantizer are learned, and how scale, zero point and gradient follow.

| method | learned | source |
| --- | --- | --- |
| `lsq` | log2 of the scale | Esser et al. 2020 (arXiv 1902.08153) |
| `lsq_plus` | log2 of the scale, the zero point | Bhalgat et al. 2020 (arXiv 2004.09576) |
| `pact` | the clipping value alpha | Choi et al. 2018 (arXiv 1805.06085) |
| `tqt` | log2 of the threshold; scales are powers of two | Jain et al. 2020 (arXiv 1903.08066) |
| `static` | nothing; calibrated once | |
| `dynamic` | nothing; the range of the tensor at every step (weights only) | |
| `absmean` | nothing: the weight's mean magnitude at every step (ternary) | Ma et al. 2024 (arXiv 2402.17764) |

Scales are learned as logarithms, so no step of an optimizer can make one zero or negative. The gradient of the scale
itself is the paper's.
"""

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics import gradients
from qjax.numerics.affine import QParams, QSpec, choose_qparams, split_groups
from qjax.numerics.gradients import Slopes
from qjax.numerics.learned_scale import LOG2_LIMIT, learned_scale, log2_scale_of, pact_scale, power_of_two_scale
from qjax.numerics.weight_formats import mean_magnitude
from qjax.support.names import did_you_mean


class Estimator(abc.ABC):
    """How a quantizer learns. Estimators are immutable and hashable: numbers are arguments, never attributes.

    An instance can be used instead of a name: `Recipe(method=Own())`, `Override(method=Own())`.

    Examples:
      >>> from qjax import calibration
      >>> isinstance(calibration.LSQ(), calibration.Estimator)
      True
    """

    name: ClassVar[str]
    """Its name in tables and messages."""

    learned: ClassVar[tuple[str, ...]] = ()
    """The parameters of `init` that an optimizer updates; only calibration sets the others."""

    follows_tensor: ClassVar[bool] = False
    """Whether the scale is computed from the tensor at every step; then `init` returns nothing."""

    powers_of_two: ClassVar[bool] = False
    """Whether every scale is a power of two, as some targets need."""

    def check(self, what: str, spec: QSpec) -> None:  # noqa: B027
        """Raise a ValueError for a spec that this method does not support. what: the start of the message."""

    @abc.abstractmethod
    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        """The initial parameters after calibration.

        Args:
          scale, zero_point: float32 and int32, as calibrated; for a layer in a scan with an axis in front. Every
            parameter must have their shape.
        """

    @abc.abstractmethod
    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        """Scale (float32, finite, positive) and zero point (int32; float32 if it is learned).

        They determine the shipped codes, so eager mode and `jit` must compute the same bits: use
        `qjax.numerics.learned_scale`, not `jnp.exp2`, whose last bit differs.

        Args:
          params: the parameters from `init`, as training has changed them. x: the tensor, if `follows_tensor`.
        """

    @abc.abstractmethod
    def gradient(self, steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
        """The derivatives of the quantized tensor, see `qjax.numerics.gradients`."""


def _log2_scales(scale: np.ndarray) -> np.ndarray:
    """The logarithms of scales; a channel that is too small to learn gets 1, the scale of a channel of zeros.

    `choose_qparams` does the same below 2^-100. Raises ValueError if every channel is too small.
    """
    small = scale < 2.0**-LOG2_LIMIT
    return log2_scale_of(np.where(small & ~np.all(small), 1.0, scale))


class LSQ(Estimator):
    """Learned step size: training updates the logarithm of the scale; the zero point stays as calibrated.

    With c = clip(round(x / s), low, high), where low and high are qmin and qmax minus the zero point, the value is c *
    s. Its derivative by s is c - x / s inside the range and c outside; by x it is 1 inside and 0 outside. The
    derivative by s is multiplied by 1 / sqrt(N * qmax), where N elements share the scale.

    Paper: Esser et al. 2020, Learned Step Size Quantization (arXiv 1902.08153).

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(method="lsq", weight_method="lsq")  # the default
    """

    name = "lsq"
    learned = ("log2_scale",)

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        return {"log2_scale": _log2_scales(scale), "zero_point": zero_point}

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        # All scales of a model are computed from one vector before the forward pass, see `learned.with_scales`.
        scale = params["scale"] if "scale" in params else learned_scale(params["log2_scale"])
        return QParams(scale, params["zero_point"], spec)

    def gradient(self, steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
        return gradients.lsq(steps, rounded, low, high)


class LSQPlus(LSQ):
    """Learned step size and zero point.

    As `LSQ`, but training also updates the zero point z: the value is (clip(round(x / s) + z, qmin, qmax) - z) * s. The
    derivative by z is 0 inside the range and -s outside.

    Paper: Bhalgat et al. 2020, LSQ+: Improving low-bit quantization through learnable offsets and better initialization
    (arXiv 2004.09576).

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(method="lsq_plus")  # activations; weights stay with "lsq"
    """

    name = "lsq_plus"
    learned = ("log2_scale", "zero_point")

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        return {"log2_scale": _log2_scales(scale), "zero_point": zero_point.astype(np.float32)}


class PACT(Estimator):
    """A learned clipping value alpha for the outputs of ReLUs: the codes cover [0, alpha].

    The scale is alpha / (qmax - qmin). The derivative by alpha is 1 where x is above alpha, and 0 below; by x it is 1
    inside the range and 0 outside.

    Paper: Choi et al. 2018, PACT: Parameterized Clipping Activation for Quantized Neural Networks (arXiv 1805.06085).

    Examples:
      >>> import qjax
      >>> relu = qjax.QSpec(bits=4, signed=False, symmetric=False)
      >>> recipe = qjax.Recipe(activations=relu, method="pact")
    """

    name = "pact"
    learned = ("alpha",)

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        alpha = scale * np.float32(spec.qmax - spec.qmin)
        log2_scale_of(alpha)  # raises for values that `pact_scale` would clip
        return {"alpha": alpha}

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        scale = pact_scale(params["alpha"], spec.qmax - spec.qmin)
        return QParams(scale, jnp.full(scale.shape, spec.qmin, jnp.int32), spec)

    def gradient(self, steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
        return gradients.pact(steps, rounded, low, high)


class TQT(Estimator):
    """Trained quantization thresholds: scales are powers of two, so that requantization is a shift.

    Training updates t = log2 of the threshold. The scale is 2^ceil(t) divided by the number of codes on one side:
    2^(bits
    - 1) for signed codes, 2^bits for unsigned ones. The gradient is that of `LSQ` through the ceiling.

    Paper: Jain et al. 2020, Trained Quantization Thresholds for Accurate and Efficient Fixed-Point Inference of Deep
    Neural Networks (arXiv 1903.08066).

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(
      ...     target="fpga", method="tqt", weight_method="tqt", activations=qjax.QSpec(bits=8)
      ... )
    """

    name = "tqt"
    learned = ("log2_threshold",)
    powers_of_two = True

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        levels = 2 ** (spec.bits - 1) if spec.signed else 2**spec.bits
        threshold = _log2_scales(scale) + np.float32(math.log2(levels))
        return {"log2_threshold": threshold.astype(np.float32), "zero_point": zero_point}

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        return QParams(power_of_two_scale(params["log2_threshold"], spec.qmax), params["zero_point"], spec)

    def gradient(self, steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
        return gradients.lsq(steps, rounded, low, high)


class Static(Estimator):
    """Scale and zero point stay as calibrated. The gradient is 1 where x is inside the range (straight-through).

    Paper: Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference (arXiv 1712.05877).

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(method="static", weight_method="static")
    """

    name = "static"

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        return {"scale": scale, "zero_point": zero_point}

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        return QParams(params["scale"], params["zero_point"], spec)

    def gradient(self, steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
        return gradients.ste(steps, rounded, low, high)


class Dynamic(Static):
    """For weights: the scale follows the weight's own range at every step, so nothing is learned.

    The scale is max(|x|) / qmax for symmetric codes and (max(x) - min(x)) / (qmax - qmin) for asymmetric ones, per
    tensor, channel or group as in the spec.

    Paper: Jacob et al. 2018 (arXiv 1712.05877), section 3.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(weight_method="dynamic")
    """

    name = "dynamic"
    follows_tensor = True

    def init(self, spec: QSpec, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        assert x is not None
        view, axes = split_groups(lax.stop_gradient(x).astype(jnp.float32), spec)
        return choose_qparams(jnp.min(view, axes), jnp.max(view, axes), spec)


class AbsMean(Dynamic):
    """For ternary weights: the scale is the mean of |x| at every step, and the codes are -1, 0 and 1.

    Paper: Ma et al. 2024, The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits (arXiv 2402.17764).

    Examples:
      >>> import qjax
      >>> ternary = qjax.Override(weights=qjax.QSpec(bits=2), method="absmean")
      >>> recipe = qjax.Recipe(overrides={"blocks/.*/kernel": ternary})
    """

    name = "absmean"

    def check(self, what: str, spec: QSpec) -> None:
        if not (spec.bits == 2 and spec.symmetric and spec.signed and spec.narrow_range and spec.per_tensor):
            raise ValueError(
                f'{what}: the method "absmean" is for ternary weights: expected QSpec(bits=2), per tensor and with the '
                f"codes -1, 0 and 1, got {spec}."
            )

    def qparams(self, spec: QSpec, params: Mapping[str, Any], x: jax.Array | None = None) -> QParams:
        assert x is not None
        return QParams(mean_magnitude(x), jnp.zeros((), jnp.int32), spec)


_ESTIMATORS: dict[str, Estimator] = {cls.name: cls() for cls in (LSQ, LSQPlus, PACT, TQT, Static, Dynamic, AbsMean)}


def estimators() -> tuple[str, ...]:
    """The names that `estimator` knows.

    Examples:
      >>> from qjax import calibration
      >>> "lsq" in calibration.estimators()
      True
    """
    return tuple(_ESTIMATORS)


def estimator(method: str | Estimator) -> Estimator:
    """The estimator with that name; an estimator is returned unchanged.

    Args:
      method: a name from `estimators()`, or an `Estimator`.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
      TypeError: `method` is neither a name nor an estimator, or it is an estimator without a hash.

    Examples:
      >>> from qjax import calibration
      >>> calibration.estimator("lsq").learned
      ('log2_scale',)
    """
    if isinstance(method, Estimator):
        if type(method).__hash__ is None:
            raise TypeError(
                f"{type(method).__name__}: expected a hashable estimator, because JAX traces equal ones once. For a "
                "dataclass, write @dataclasses.dataclass(frozen=True)."
            )
        return method
    if not isinstance(method, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        made = ": make an instance of it." if isinstance(method, type) else "."
        raise TypeError(f"expected the name of a method or a qjax.calibration.Estimator, got {method!r}{made}")
    if method not in _ESTIMATORS:
        raise ValueError(
            f"Unknown method {method!r}.{did_you_mean(method, _ESTIMATORS)} Expected one of {', '.join(_ESTIMATORS)}, "
            "or a qjax.calibration.Estimator."
        )
    return _ESTIMATORS[method]
