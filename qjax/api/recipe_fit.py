"""Checks whether a recipe fits a model: unused settings, impossible group sizes, parts that must stay float.

`quantize` reports each of these once for the whole model, before it calibrates anything.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from qjax.calibration.learned import Quantizer
from qjax.export.ieee import uncertain_equations
from qjax.layers import Traced
from qjax.model.quantized_model import Plan
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic
from qjax.ops.facts import ProductFacts
from qjax.recipe.keys import ancestors, can_scale_rows
from qjax.recipe.override import Override, in_floats, setting_of
from qjax.recipe.recipe import Recipe, name_of
from qjax.support.errors import refuse
from qjax.tracing import Annotation, Place, made_of, makes_codes, setting_of_product

_SHOWN = 8
"""How many names one warning lists."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A recipe together with the model that it is meant for.

    types: module path -> class. edges: the quantizers of the first and the last layer. adapters: whether the model has
    any.
    """

    recipe: Recipe
    types: Mapping[str, type]
    annotation: Annotation
    places: Mapping[str, Place]
    quantizers: Mapping[str, Quantizer]
    plan: Plan
    edges: Collection[str]
    adapters: bool

    def other_groups(self) -> str:
        """List the weights whose groups differ from what the recipe asks for, and what they have; "" for none.

        Raises:
          ValueError: no weight can have groups of the requested size.
        """
        found = list[tuple[int, int | None, str]]()
        for name, place in self.places.items():
            size = self.recipe.spec_of(place, self.types).group_size if place.kind == "weight" else None
            if size is not None:
                spec = self.quantizers[name].spec
                scales = "per tensor" if spec.per_tensor else "per channel"
                scales = scales if spec.group_size is None else f"groups of {spec.group_size}"
                found.append((size, spec.group_size, f"{name!r} ({place.op}) {scales}"))
        served = {size for size, got, _ in found if got == size}
        for product in self.plan.products:
            asked, got = self.plan.setting_of(product.module), _group_of(product.setting)
            size = _group_of(asked)
            usual = isinstance(asked, WeightFormat) and asked.group_size is None
            if size is not None and (usual or got == size):
                served.add(size)
            # A format that uses one group for a weight smaller than the group size is no surprise.
            if size is not None and not (usual and product.scales == "per channel" and (got or 0) <= size):
                found.append((size, got, f"{product.name!r} ({product.op}) {product.scales}"))
        missing = [(size, text) for size, got, text in found if got != size]
        refuse(
            f"quantize: no weight of this model can have groups of {size}. The size must divide the one axis that a "
            "matrix product sums over. Choose another group_size, or leave it out. What the weights can have: "
            f"{_join_names([text for own, text in missing if own == size])}."
            for size, _ in missing
            if size not in served
        )
        if not missing:
            return ""
        tables = any(can_scale_rows(place) for place in self.places.values())
        rows = ", or for the rows of a table QSpec(bits=4, axis=0, group_size=32, group_axis=1)" if tables else ""
        return (
            "quantize: only matrix products have groups, and only of a size that divides the axis that they sum over "
            f"(see qjax.QSpec). So these weights have other scales: {_join_names([text for _, text in missing])}. "
            "Where that is too coarse, give them a spec of their own in overrides: one of 8 bits or of another "
            f"group_size{rows}."
        )

    def float_backward(self) -> str:
        """List the products whose backward pass stays in floats although the recipe has `gradients`; "" for none.

        Raises:
          ValueError: no product has an integer backward pass, so `gradients` would have no effect.
        """
        if self.recipe.gradients is None:
            return ""
        names = {key: place.name for key, place in self.annotation.weights.items()}
        covered, left = list[str](), [f"{product.name!r} (quantized at run time)" for product in self.plan.products]
        for eqn, (op, _) in self.annotation.ops.items():
            if not isinstance(op, ProductFacts):
                continue
            name = next((names[eqn, i] for i in range(len(eqn.inputs)) if (eqn, i) in names), f"{eqn.scope}/{op.name}")
            grouped = name in self.quantizers and self.quantizers[name].spec.group_size is not None
            if op.has_integer_backward(eqn) and not grouped:
                covered.append(name)
            else:
                left.append(f"{name!r} ({'groups of scales' if grouped else op.name})")
        if not covered:
            refuse(
                [
                    "quantize: Recipe(gradients=...) rounds the gradients of matrix products and convolutions without "
                    f"groups, and this model has none in integers{': ' if left else ''}{_join_names(left)}. Leave "
                    "gradients out."
                ]
            )
        if not left:
            return ""
        return (
            "quantize: Recipe(gradients=...) rounds the gradients of matrix products and convolutions without groups. "
            f"The backward pass of others stays in floats: {_join_names(list(dict.fromkeys(left)))}."
        )

    # ------------------------------------------------------------------ settings that nothing uses

    def unused(self) -> str:
        """List the settings of the recipe that no tensor uses, with cures; "" for none.

        Raises:
          ValueError: an override sets nothing that applies to the tensors that it matches.
        """
        refuse(self._idle())
        said = [*self._replaced_overrides(), *self._unused_fields()]
        return "" if not said else "quantize: a part of the recipe has no effect on this model. " + " ".join(said)

    @functools.cached_property
    def _overrides(self) -> Mapping[str, Sequence[tuple[Any, Any]]]:
        """Quantizer -> the overrides that match it."""
        return {name: list(self.recipe.overrides_of(place, self.types)) for name, place in self.places.items()}

    @functools.cached_property
    def _deciding(self) -> Mapping[tuple[str, str], Any]:
        """(quantizer, field) -> the key of the override that sets it."""
        found: dict[tuple[str, str], Any] = {}
        for name, place in self.places.items():
            for key, value in self._overrides[name]:
                found.update({(name, field): key for field in _fields(place) if _states(value, field)})
        return found

    def _applied_fields(self, key: Any, value: Any) -> list[tuple[str, str]]:
        """The (quantizer, field) pairs that an override sets."""
        return [
            (name, field)
            for name, place in self.places.items()
            if any(own == key for own, _ in self._overrides[name])
            for field in _fields(place)
            if _states(value, field)
        ]

    def _idle(self) -> Iterator[str]:
        for key, value in self.recipe.overrides.items():
            if in_floats(value) or self._applied_fields(key, value):
                continue
            matched = [repr(n) for n, own in self._overrides.items() if any(other == key for other, _ in own)]
            kind, other = ("weights", "activations") if _states(value, "weights") else ("activations", "weights")
            yield (
                f"Recipe: override {name_of(key)} sets {kind}, but it matches only {other}: "
                f"{_join_names(matched)}. Write qjax.Override({other}=...), or leave it out."
            )

    def _replaced_overrides(self) -> Iterator[str]:
        deciding = set(self._deciding.values())
        for key, value in self.recipe.overrides.items():
            if not in_floats(value) and key not in deciding:
                later = name_of(self._deciding[self._applied_fields(key, value)[0]])
                yield f"The later override {later} replaces override {name_of(key)}, so list {name_of(key)} after it."

    def _unused_fields(self) -> Iterator[str]:
        weights = [name for name, place in self.places.items() if place.kind == "weight"]
        others = [name for name in self.places if name not in weights]
        settings = [setting_of(value) for value in self.recipe.overrides.values()]
        dynamic = [setting for setting in settings if isinstance(setting, Dynamic)]

        def is_taken(names: Sequence[str], field: str) -> bool:
            # whoever names one tensor, as the recipe of a `post_training` report does, replaces the setting knowingly
            return any(self._deciding.get((name, field), name) == name for name in names) or any(
                getattr(setting, field, self) is None for setting in dynamic
            )

        elsewhere = "Set it in the override: qjax.Dynamic(weights=..., activations=...) or qjax.Override(...)."
        why = {
            "weights": (is_taken(weights, "weights"), f"no weight without an override is an integer. {elsewhere}"),
            "activations": (
                is_taken(others, "activations"),
                f"no activation without an override is an integer. {elsewhere}",
            ),
            "method": (is_taken(others, "method"), "no activation has a scale that it finds."),
            "weight_method": (is_taken(weights, "method"), "no weight has a scale that it finds."),
            "observer": (bool(others), "no activation is calibrated."),
            "weight_observer": (
                any(not self.quantizers[name].follows_tensor for name in weights),
                "no weight is calibrated.",
            ),
            "first_last_bits": (bool(self.edges), f"no layer has calibrated integers. {elsewhere}"),
            "output_bits": (bool(self.annotation.output_names), "no calibrated integers leave the model."),
            "other_bits": (
                any(name not in self.annotation.operands for name in others),
                "products read every activation that is quantized.",
            ),
            "scan": (any(p.own(p.stack) for p in self.places.values()), "no scan holds layers with quantizers."),
            "reduce_range": (
                is_taken([], "activations") or any(self.quantizers[name].spec.bits == 7 for name in others),
                "no activation has 8 bits.",
            ),
            "adapters": (self.adapters, "the model has no adapters (nnx.LoRAParam)."),
        }
        for name, value in self.recipe.stated().items():
            used, reason = why.get(name, (True, ""))
            if not used:
                yield f"Nothing uses {name}={value!r}, because {reason}"


def float_steps(traced: Traced, annotation: Annotation, plan: Plan) -> str:
    """List the steps of parts under `Dynamic` whose bits differ between machines, with the cure; "" for none.

    Adapters are left out, because they are merged into the weights in the end.
    """
    program = traced.results
    adapted = made_of(program, traced.adapters)
    inside = [
        eqn
        for eqn in program.walk()
        if eqn in annotation.floats
        and isinstance(plan.setting_of(eqn.scope), Dynamic)
        and setting_of_product(eqn) is None
        and not makes_codes(eqn)
        and adapted.isdisjoint(eqn.inputs)
    ]
    found: dict[str, str] = {}
    for eqn, why in uncertain_equations(inside):
        found.setdefault(eqn.scope, f"{repr(eqn.scope) if eqn.scope else 'the model itself'} ({why})")
    if not found:
        return ""
    around = {path for scope in found for path in (*ancestors(scope), "")}
    whole = [p.module for p in plan.products if p.module not in around and isinstance(p.setting, Dynamic)]
    keys = list(dict.fromkeys(whole))
    if len(keys) > _SHOWN:
        keys = list(dict.fromkeys(re.sub(r"(?<![^/_])\d+(?=/|$)", r"\\d+", key) for key in keys))
    cure = (
        f"Give it to the products alone, so that the rest becomes integers: overrides={{{'|'.join(keys)!r}: "
        f"qjax.Dynamic(...)}}."
        if whole
        else "Put each product with a weight into a module of its own, and give it to those alone."
    )
    return (
        "quantize: parts under qjax.Dynamic stay in float between their products. The following contain steps whose "
        "bits differ between machines, so `emit` can write the model to StableHLO only: "
        f"{_join_names([*found.values()])}. {cure}"
    )


def _fields(place: Place) -> tuple[str, str]:
    """The fields of an override that apply to a tensor."""
    return ("weights" if place.kind == "weight" else "activations", "method")


def _states(value: Any, field: str) -> bool:
    """Whether an override sets a field; a bare spec sets the weights."""
    return getattr(value, field) is not None if isinstance(value, Override) else field == "weights"


def _group_of(setting: Any) -> int | None:
    """The group size of a `Dynamic` or a `WeightFormat`."""
    weights = setting.weights if isinstance(setting, Dynamic) else setting
    return getattr(weights, "group", getattr(weights, "group_size", None))


def _join_names(texts: Sequence[str]) -> str:
    return ", ".join([*texts[:_SHOWN], *([f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else [])])
