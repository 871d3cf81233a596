"""`Override` and `FLOAT`, the exceptions of a recipe for one part of a model, and the checks of a recipe's fields."""

import dataclasses
from typing import Any

from qjax import calibration
from qjax.calibration.learned import Method
from qjax.numerics.affine import QSpec
from qjax.numerics.qspec import known_fields
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic
from qjax.support.names import did_you_mean

ELSEWHERE = {
    "bits": "Set bits for weights or for activations: Recipe(weights=QSpec(bits=4, axis=-1)).",
    "axis": "Set the axis of the weights: weights=QSpec(axis=-1).",
    "symmetric": "Set symmetry for weights or for activations: activations=QSpec(symmetric=False).",
}
"""Names that people expect as arguments of a recipe, and where the setting is instead."""


class Float:
    """The type of `FLOAT`."""

    def __repr__(self) -> str:
        return "qjax.FLOAT"


FLOAT = Float()
"""As an override: do not quantize this part of the model."""


@known_fields(ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class Override:
    """What differs for one part of the model; a field that is None follows the recipe.

    Args:
      weights: the codes of weights. A `WeightFormat` keeps the activations in float, and takes no other argument.
      activations: the codes of activations.
      method: how scales of both are learned, as in `Recipe`.

    Examples:
      >>> import qjax
      >>> wide = qjax.Override(activations=qjax.QSpec(bits=16), method="static")
      >>> recipe = qjax.Recipe(overrides={"head": wide})
    """

    weights: QSpec | WeightFormat | None = None
    activations: QSpec | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weights, WeightFormat):
            if self.activations is not None or self.method is not None:
                raise ValueError(
                    f"Override: weights={self.weights!r} keeps activations in float: expected neither activations nor "
                    "a method. Leave them out."
                )
            return
        for name in ("weights", "activations"):
            if getattr(self, name) is not None:
                check_spec(f"Override: {name}", getattr(self, name))
        if self.method is not None:
            check_method("Override: method", self.method)
        if self.method == "pact" and self.activations is not None:
            check_pact("Override: activations", self.activations)


def one_of(what: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise a ValueError if `value` is not one of `known`."""
    if value not in known:
        raise ValueError(
            f"{what}: expected one of {', '.join(map(repr, known))}, got {value!r}.{did_you_mean(value, known)}"
        )


def in_floats(value: Any) -> bool:
    """Whether an override keeps floats between operations, so that the part has no quantizers."""
    return isinstance(value, Float) or setting_of(value) is not None


def setting_of(value: Any) -> Dynamic | WeightFormat | None:
    """How the matrix products of a float part are computed: by a `Dynamic`, a `WeightFormat`, or as they are (None)."""
    value = value.weights if isinstance(value, Override) else value
    return value if isinstance(value, (Dynamic, WeightFormat)) else None


def check_method(what: str, value: Any) -> None:
    """Raise for anything but an estimator or the name of one."""
    if not isinstance(value, calibration.Estimator):
        one_of(what, value, calibration.estimators())


def check_spec(what: str, value: Any) -> None:
    """Raise a TypeError for anything but a `QSpec`."""
    if not isinstance(value, QSpec):
        raise TypeError(f"{what}: expected a QSpec, got {value!r}.{bits_cure(value)}")


def bits_cure(value: Any) -> str:
    """The cure for a number of bits where a `QSpec` is expected; "" for anything else."""
    return f" For {value} bits write QSpec(bits={value})." if type(value) is int else ""


def check_pact(what: str, spec: QSpec) -> None:
    """Raise for a signed symmetric spec, because PACT clips to [0, alpha] and its lowest code represents 0."""
    if spec.symmetric and spec.signed:
        raise ValueError(
            f'{what}: method "pact" clips to [0, alpha], so it needs a spec whose lowest code represents 0; got '
            f"{spec}. "
            f"Use QSpec(bits={spec.bits}, symmetric=False), or another method."
        )
