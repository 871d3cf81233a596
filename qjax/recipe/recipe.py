"""The recipe: which tensors get how many bits, and how their scales are found and learned."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from qjax import calibration, targets
from qjax.assign import int16_limits
from qjax.assign.backend import Backend, target_of
from qjax.calibration.learned import Method, Quantizer
from qjax.numerics.affine import QSpec
from qjax.numerics.gradient_codes import Gradients as Gradients
from qjax.numerics.qspec import known_fields
from qjax.numerics.weight_formats import WeightFormat as WeightFormat
from qjax.ops import dynamic, formulas
from qjax.ops.dynamic import Dynamic as Dynamic
from qjax.ops.embed_rows import has_scales_of_rows
from qjax.recipe.keys import ancestors, can_scale_rows, matches, paths_of, weight_spec
from qjax.recipe.override import (
    ELSEWHERE,
    Float,
    bits_cure,
    check_method,
    check_pact,
    check_spec,
    in_floats,
    one_of,
    setting_of,
)
from qjax.recipe.override import FLOAT as FLOAT
from qjax.recipe.override import Override as Override
from qjax.support.extensions import Profile, profiles
from qjax.support.names import did_you_mean
from qjax.tracing import Integers, Place

WeightObserver = Literal["auto", "minmax", "mse", "lsq"]
ScanMode = Literal["stacked", "shared"]
AdapterMode = Literal["beside", "within"]


class _Unsaid(str):
    """The default target, distinguishable from the same name given by the user: a profile replaces the default only."""


_TARGET = _Unsaid("nearest_even")
_WEIGHTS = QSpec(bits=8, axis=-1)
_ACTIVATIONS = QSpec(bits=8, symmetric=False)
"""Defaults, which a profile replaces. Identity tells them from an equal spec of the user's."""


def integers(name: str, low: int, high: int) -> Integers:
    """Declare the range of an integer input, for `Recipe(integers=...)`.

    A function of integers, such as the sine of positions, becomes one table with a row for each integer. An integer out
    of range is an error; where its value is not known yet (inside jit, in emitted code) it reads the nearest row.

    Args:
      name: of the model's argument, such as "positions"; for an array within a structure its path: "batch/positions".
      low, high: the least integer, and one more than the greatest: 0 and 4096 for 4096 positions.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(integers=[qjax.integers("positions", 0, 511)])
    """
    return Integers(name, low, high)


@known_fields(ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is quantized: which runtime's rounding to match, how many bits, and how scales are found and learned.

    Args:
      target: the runtime whose rounding the converted graph matches: a name from `qjax.targets.names()`, a `Target`, or
        a `qjax.export.Backend` for a device with kernels of its own. The default is "nearest_even".
      weights: the codes of weights; the default is `QSpec(bits=8, axis=-1)`. With `axis=-1` each output channel has its
        own scale, whichever axis of the kernel that is; with `axis=None` the tensor has one scale. An embedding table
        has one scale, unless an override with `axis=0` gives each of its rows a scale; then the looked-up rows have a
        quantizer of their own. With `group_size` matrix products have groups; `QSpec` lists what other weights get.
      activations: the codes of activations; the default is `QSpec(bits=8, symmetric=False)`. They have one scale per
        tensor.
      overrides: what differs for parts of the model; later entries win. A key is a layer type, or a regular expression
        that must match a whole path: of a module, of one of its parents, or of a quantizer. A value is a `QSpec` for
        the weights, an `Override`, `FLOAT`, a `Dynamic` or a `WeightFormat`.
      first_last_bits: bits of the first and the last layer: of their weights, their inputs, and the last one's output.
      output_bits: the least number of bits of the model's output tensors. With 2 bits, class scores would tie.
      other_bits: the least number of bits of activations that no sum of products reads: the branches of a residual
        sum, the input of a norm, a softmax or another function, the cell of an LSTM. None: those of `activations`.
        Papers count only what convolutions and dense layers read (LSQ, arXiv 1902.08153), as `other_bits=8` does.
      method: how scales of activations are learned in training: a name from `qjax.calibration.estimators()`, or an
        `Estimator`.
      weight_method: the same for weights.
      observer: how scales of activations are found before training: a name from `qjax.calibration.names()`, an
        `Observer`, or "auto": the exact range at 8 bits and more, the least squared error below.
      weight_observer: how scales of weights are found: "minmax", "mse", "lsq", or "auto" as above.
      scan: whether the layers of a scan have quantizers of their own ("stacked") or share one ("shared").
      reduce_range: use 7 of the 8 bits of every activation, including the model's inputs and outputs: 0..127 or
        -64..63. x86 CPUs without VNNI add 8-bit products in int16 pairs that saturate; with 7 bits no pair can, since 2
        * 127 * 128 < 2^15. On other CPUs it loses a bit for nothing. `qjax.accumulators` counts the pairs at risk.
      integers: the ranges of integer inputs of which the model computes functions, see `qjax.integers`. Other integer
        inputs get the range of the batches that `quantize` and `calibrate` see.
      adapters: how low-rank adapters (`nnx.LoRAParam`) are quantized. "beside": as layers of their own; in parts with
        `Dynamic` or a `WeightFormat` they stay float. "within": as a part of the weight that they adapt, so that
        merging changes no code, see `qjax.training.merge_adapters`.
      profile: the device that the model is for: a name from `qjax.profiles.names()`, or a `Profile`. It fills in the
        settings that are not given: target, weights, activations, and sometimes methods. A setting that contradicts it
        is an error here. Parts of the model that the device does not support are an error of `quantize`, `convert` and
        `graph.emit`. "llama_cpp_q4_0", "llama_cpp_q8_0" and their like stand for overrides, which come before those
        that are given: products on the grid and in the arithmetic of llama.cpp, see `qjax.Dynamic`.
      gradients: how the backward pass rounds gradients, so that its matrix products and convolutions multiply integers
        as well, see `Gradients`. None: the backward pass is in floats. It changes neither the forward nor the graph.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(
      ...     target="tflite_micro",
      ...     weights=qjax.QSpec(bits=4, axis=-1),
      ...     first_last_bits=8,
      ...     overrides={"decoder/.*": qjax.FLOAT},
      ... )
    """

    target: str | targets.Target | Backend = _TARGET
    weights: QSpec = _WEIGHTS
    activations: QSpec = _ACTIVATIONS
    overrides: Mapping[str | type, Any] = dataclasses.field(default_factory=dict)
    first_last_bits: int | None = None
    output_bits: int = 8
    other_bits: int | None = dataclasses.field(default=None, kw_only=True)
    method: Method = "lsq"
    weight_method: Method = "lsq"
    observer: Any = "auto"
    weight_observer: WeightObserver = "auto"
    scan: ScanMode = "stacked"
    reduce_range: bool = False
    integers: Sequence[Integers] = ()
    adapters: AdapterMode = "beside"
    profile: str | Profile | None = None
    gradients: Gradients | None = None

    def __post_init__(self) -> None:
        own = None if self.profile is None else profiles().overrides_of(self.profile)
        if own is not None:
            object.__setattr__(self, "overrides", {**own, **self.overrides})
            object.__setattr__(self, "profile", None)
        elif self.profile is not None:
            self._take_profile(profiles().get(self.profile))
        formulas.check_target(target_of(self.target))
        check_spec("Recipe: weights", self.weights)
        check_spec("Recipe: activations", self.activations)
        if not self.activations.per_tensor:
            raise ValueError(
                f"Recipe: expected per-tensor activations, got {self.activations}. An integer accumulator sums over "
                "the channels of an activation, so they must share one scale. Drop axis and group_size."
            )
        check_method("Recipe: method", self.method)
        check_method("Recipe: weight_method", self.weight_method)
        if calibration.estimator(self.method).follows_tensor:
            raise ValueError(
                f'Recipe: expected a method for activations, got "{calibration.estimator(self.method).name}", which is '
                'for weights only. Use method="static" for activations that do not learn, or '
                'overrides={".*": qjax.Dynamic()} for scales of activations that are found at run time.'
            )
        for name, known in (
            ("weight_observer", get_args(WeightObserver)),
            ("scan", get_args(ScanMode)),
            ("adapters", get_args(AdapterMode)),
        ):
            one_of(f"Recipe: {name}", getattr(self, name), known)
        if self.method == "pact":
            check_pact("Recipe: activations", self.activations)
        if self.observer != "auto":
            calibration.get(self.observer)
        if isinstance(self.integers, Integers) or not all(isinstance(known, Integers) for known in self.integers):
            raise TypeError(f"Recipe: integers: expected a list of qjax.integers(...), got {self.integers!r}.")
        if self.gradients is not None and not isinstance(self.gradients, Gradients):
            raise TypeError(
                f"Recipe: gradients: expected a qjax.Gradients or None, got {self.gradients!r}. Use "
                "gradients=qjax.Gradients(bits=8)."
            )
        if type(self.reduce_range) is not bool:
            raise TypeError(f"Recipe: reduce_range: expected True or False, got {self.reduce_range!r}.")
        for name in ("output_bits", "first_last_bits", "other_bits"):
            bits = getattr(self, name)
            if bits is not None and (type(bits) is not int or not 2 <= bits <= 16):
                raise ValueError(f"Recipe: {name}: expected an integer in 2..16, got {bits!r}.")
        for key, value in self.overrides.items():
            if not isinstance(value, (QSpec, Override, Float, Dynamic, WeightFormat)):
                raise TypeError(
                    f"Recipe: override {key!r}: expected a QSpec, an Override, qjax.FLOAT, qjax.Dynamic() or a "
                    f"qjax.WeightFormat, got {value!r}.{bits_cure(value)}"
                )
            if isinstance(key, str):
                try:
                    re.compile(key)
                except re.error as error:
                    raise ValueError(f"Recipe: override {key!r} is not a regular expression: {error}.") from None
            elif not isinstance(key, type):
                raise TypeError(f"Recipe: overrides: expected a path or a layer type as a key, got {key!r}.")
            try:
                self._setting_of(value)
            except ValueError as error:
                raise ValueError(
                    f"Recipe: override {name_of(key)}: qjax.Dynamic without codes of its own takes those of the "
                    f"recipe. {error} Or give it its own: qjax.Dynamic(weights=QSpec(bits=8, axis=-1), "
                    "activations=QSpec(bits=8))."
                ) from None

    def _take_profile(self, profile: Profile) -> None:
        """Fill in the settings that the profile proposes, and refuse those that contradict it."""
        profiles().register(profile)
        object.__setattr__(self, "profile", profile.name)
        own = {"target": (_TARGET, profile.targets[0]), "weights": (_WEIGHTS, profile.weights)}
        own["activations"] = (_ACTIVATIONS, profile.activations)
        for name, (default, proposed) in own.items():
            if getattr(self, name) is default:
                object.__setattr__(self, name, proposed)
        for name, value in profile.recipe.items():
            if getattr(self, name) == type(self).__dataclass_fields__[name].default:
                object.__setattr__(self, name, value)
        specs = {"weights": self.weights, "activations": self.activations}
        profiles().check_recipe(profile, target_of(self.target).name, specs)

    # ------------------------------------------------------------------ what the parts of a model get

    def float_paths(self, types: Mapping[str, type]) -> frozenset[str]:
        """The paths of modules that compute in float between their matrix products."""
        keys = [key for key, value in self.overrides.items() if in_floats(value)]
        return frozenset(path for key in keys for path in paths_of(key, types))

    def _setting_of(self, value: Any) -> Dynamic | WeightFormat | None:
        """How products under an override are computed; codes that it does not set come from the recipe."""
        setting = setting_of(value)
        if not isinstance(setting, Dynamic):
            return setting
        activations = dynamic.ACTIVATIONS if self.activations is _ACTIVATIONS else self.activations
        if self.reduce_range and activations.bits == 8:
            activations = activations.replace(bits=7)
        return setting.over(self.weights, activations)

    def dynamic_paths(self, types: Mapping[str, type]) -> tuple[tuple[str, "Dynamic | WeightFormat | None"], ...]:
        """Module path -> how its products run; None if a later override of that part keeps them in float."""
        found: dict[str, Dynamic | WeightFormat | None] = {}
        for key, value in self.overrides.items():
            if in_floats(value):
                tops = paths_of(key, types)
                inside = [path for path in types if tops.intersection((*ancestors(path), ""))]
                found.update(dict.fromkeys(inside, self._setting_of(value)))
        return tuple(found.items()) if any(found.values()) else ()

    def check_dynamic(self, modules: Collection[str], types: Mapping[str, type]) -> None:
        """Raise for a `Dynamic` or `WeightFormat` without a product to compute. modules: the paths that have one."""
        inside = {path for module in modules for path in (*ancestors(module), "")}
        for key, value in self.overrides.items():
            tops = paths_of(key, types) if setting_of(value) is not None else frozenset[str]()
            if tops and not tops & inside:
                raise ValueError(
                    f"Recipe: override {name_of(key)}: qjax.{type(setting_of(value)).__name__} is for products of an "
                    f"activation with a weight, but {', '.join(map(repr, sorted(tops)))} has none of its own. "
                    "Override the module whose __call__ multiplies, or use qjax.FLOAT to keep this one in float."
                )

    def quantizer(
        self, place: Place, types: Mapping[str, type], *, edge: bool, output: bool, operand: bool
    ) -> Quantizer:
        """Choose the quantizer of one place.

        edge: it belongs to the first or last layer. output: it leaves the model. operand: a sum of products reads it.
        """
        weight = place.kind == "weight"
        least = max(self.output_bits if output else 0, 0 if operand else self.other_bits or 0)
        spec, method = self._spec_of(place, types, edge=edge, least=least)
        if self.reduce_range and not weight and spec.bits == 8:
            spec = spec.replace(bits=7)
        target = target_of(self.target)
        int16_limits.check_spec(f"Quantizer {place.name!r}", spec, target, weight=weight)
        if target.powers_of_two and not calibration.estimator(method).powers_of_two:
            raise ValueError(
                f"Recipe: the target {target.name!r} shifts accumulators, so every scale must be a power of two, but "
                f"the method {calibration.estimator(method).name!r} of {'weights' if weight else 'activations'} finds "
                f"other scales. Use {'weight_method' if weight else 'method'}='tqt'."
            )
        if weight:
            spec = weight_spec(spec, place)
            method = "lsq" if method == "pact" else method
            calibration.estimator(method).check(f"Quantizer {place.name!r}", spec)
            if method == "tqt" and not spec.symmetric:
                raise ValueError(
                    f"Quantizer {place.name!r}: power-of-two thresholds need symmetric weights, got {spec}."
                )
        elif calibration.estimator(method).follows_tensor:
            raise ValueError(
                f'Quantizer {place.name!r}: "{calibration.estimator(method).name}" is for weights. Use the name of the '
                "weight, such as 'head/kernel', as the key of the override, or another method; or use qjax.Dynamic(), "
                "which finds the scales of activations at run time."
            )
        elif not spec.per_tensor:
            raise ValueError(f"Quantizer {place.name!r}: expected a per-tensor spec for an activation, got {spec}.")
        elif method == "pact":
            check_pact(f"Quantizer {place.name!r}", spec)
        stack = place.own(place.stack) if self.scan == "stacked" else ()
        shape = place.shape if weight else place.shape[1:]
        if place.unit is not None and spec.bits == 8 and target_of(self.target).unit_grids:
            unsigned = place.unit == "unsigned"
            low = (-128 if spec.signed else 0) if unsigned else (0 if spec.signed else 128)
            fixed = (2.0**-8 if unsigned else 2.0**-7, low)
            return Quantizer(spec.replace(symmetric=False, narrow_range=False), "static", shape, stack, fixed)
        return Quantizer(spec, method, shape, stack)

    def by_row(self, places: Mapping[str, Place], types: Mapping[str, type]) -> frozenset[str]:
        """The names of the quantizers of tables that have a scale per row."""
        tables = {name: place for name, place in places.items() if can_scale_rows(place)}
        return frozenset(
            name for name, place in tables.items() if has_scales_of_rows(self.spec_of(place, types), place.shape[0])
        )

    def spec_of(self, place: Place, types: Mapping[str, type]) -> QSpec:
        """The spec that the recipe asks for in the middle of the model; the tensor may not be able to have it."""
        return self._spec_of(place, types, edge=False, least=0)[0]

    def stated(self) -> Mapping[str, Any]:
        """The settings that are neither defaults nor proposed by a profile."""
        proposed: dict[str, Any] = {}
        if self.profile is not None:
            profile = profiles().get(self.profile)
            proposed = {**profile.recipe, "weights": profile.weights, "activations": profile.activations}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in defaults}
        return {
            name: value
            for name, value in values.items()
            if value != defaults[name] and not (name in proposed and value == proposed[name])
        }

    def check_matched(self, places: Mapping[str, Place], types: Mapping[str, type]) -> None:
        """Raise if an override matches nothing; the error lists what there is to match."""
        used = {id(key) for place in places.values() for key, _ in self.overrides_of(place, types)}
        for key, value in self.overrides.items():
            if in_floats(value):
                found = bool(paths_of(key, types))
            else:
                found = id(key) in used
            if found:
                continue
            matched, floats = paths_of(key, types), self.float_paths(types)
            if matched and all(floats.intersection((*ancestors(path), "")) for path in matched):
                raise ValueError(
                    f"Recipe: override {name_of(key)} is for calibrated integers, but other overrides keep everything "
                    "that it matches in float (qjax.FLOAT, qjax.Dynamic, qjax.WeightFormat), whatever the order. "
                    "Narrow the keys of those, or give this one qjax.Dynamic(weights=...)."
                )
            near = did_you_mean(key, [*places, *filter(None, types)])
            kinds = ", ".join(sorted({cls.__name__ for cls in types.values()}))
            raise ValueError(
                f"Recipe: override {name_of(key)} matches nothing in this model.{near}\n"
                f"Module paths: {', '.join(repr(p) for p in sorted(types) if p)}\n"
                f"Quantizers: {', '.join(repr(name) for name in places)}\n"
                f"Layer types: {kinds}\n"
                "A path must match in full; use '.*' to match a part of it."
            )

    def _spec_of(self, place: Place, types: Mapping[str, type], *, edge: bool, least: int) -> tuple[QSpec, Method]:
        """The spec and method of a place. least: the fewest bits of an activation that no override sets."""
        weight, target = place.kind == "weight", target_of(self.target)
        spec, method = (self.weights, self.weight_method) if weight else (self.activations, self.method)
        if place.integers:
            # The table holds activations of at least 8 bits, because no training adapts them to fewer.
            spec = target.with_bits(spec, max(8, spec.bits, self.activations.bits))
        if edge and self.first_last_bits is not None:
            spec = target.with_bits(spec, self.first_last_bits)
        if not weight and spec.bits < least:
            spec = target.with_bits(spec, least)
        for _, value in self.overrides_of(place, types):
            override = Override(weights=value) if isinstance(value, QSpec) else value
            chosen = override.weights if weight else override.activations
            assert not isinstance(chosen, WeightFormat)  # a part with a weight format has no quantizers
            spec, method = chosen or spec, override.method or method
        return spec, method

    def observer_of(self, spec: QSpec) -> Any:
        """The observer for an activation with this spec."""
        if self.observer != "auto":
            return calibration.get(self.observer)
        # reduce_range uses 7 of the 8 bits that were asked for, so clip no more than with 8.
        wide = spec.bits >= 8 or (self.reduce_range and spec.bits == 7)
        return calibration.get("minmax" if wide else "mse")

    def weight_observer_of(self, spec: QSpec) -> Literal["minmax", "mse", "lsq"]:
        """How to find the scales of a weight with this spec."""
        if self.weight_observer != "auto":
            return self.weight_observer
        return "minmax" if spec.bits >= 8 else "mse"

    def overrides_of(self, place: Place, types: Mapping[str, type]) -> Iterator[tuple[Any, Any]]:
        """(key, value) of every override that applies to a tensor, in the recipe's order; the last one decides."""
        paths = tuple(ancestors(place.module))
        classes = tuple(types[path] for path in paths if path in types and path)
        for key, value in self.overrides.items():
            if not in_floats(value) and matches(key, (place.name, *paths), classes):
                yield key, value


def name_of(key: str | type) -> str:
    """Spell the key of an override for messages."""
    return repr(key) if isinstance(key, str) else key.__name__
