"""The search space: the units of a model, the candidates of each, and the recipe of a choice."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from qjax.analysis.layers import FLOAT_BITS, Layer, read_layers
from qjax.assign.backend import target_of
from qjax.layers import module_types
from qjax.model.quantized_model import QuantizedModel
from qjax.recipe.keys import ancestors
from qjax.recipe.recipe import FLOAT, Override, Recipe
from qjax.support.batches import batch_size

Candidate = int | Literal["float"]
"""A number of bits, or "float" for a layer that is not quantized."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Layers that get the same bits, and the quantizers that these bits apply to.

    Layers that read one tensor form one unit if the tensor's bits are chosen too. candidates: the bits that are
    possible.
    """

    layers: tuple[Layer, ...]
    quantizers: frozenset[str]
    candidates: tuple[Candidate, ...]


class Space:
    """The units of a model under a recipe.

    activations: whether a layer's bits also apply to the tensors that it reads. Layers whose weights the recipe
    overrides are not varied; they are in `fixed`.
    """

    def __init__(
        self,
        qmodel: QuantizedModel,
        recipe: Recipe,
        args: tuple[Any, ...],
        candidates: Sequence[Candidate],
        *,
        activations: bool,
    ) -> None:
        self.recipe, self.activations = recipe, activations
        self._plan, self._batch = qmodel.plan, batch_size(args)
        call = qmodel.trace(*args)
        self._traced, annotation = call.traced, call.annotation
        self._types = module_types(qmodel.model, self._traced.read)
        self._quantizers = dict(qmodel.plan.quantizers)
        layers, places = read_layers(self._traced.program, annotation, self._batch), annotation.places()
        chosen = {layer.weight for layer in layers if any(recipe.overrides_of(places[layer.weight], self._types))}
        self.fixed = tuple(layer for layer in layers if layer.weight in chosen)
        groups = _groups([layer for layer in layers if layer.weight not in chosen], shared=activations)
        self._held = {name for layer in self.fixed for name in layer.inputs}
        self._outputs = annotation.output_names
        self.units = tuple(self._unit(group, layers, candidates) for group in groups)
        if not self.units:
            raise ValueError("search: expected layers to choose bits for, but the recipe fixes all. Remove overrides.")

    def _unit(self, group: list[Layer], layers: Sequence[Layer], candidates: Sequence[Candidate]) -> Unit:
        names = {layer.weight for layer in group}
        if self.activations:
            names |= {name for layer in group for name in layer.inputs if name not in self._held}
        others = [layer.module for layer in layers if layer not in group]
        alone = all(layer.module and not any(layer.module in ancestors(module) for module in others) for layer in group)
        return Unit(tuple(group), frozenset(names), tuple(c for c in candidates if c != "float" or alone))

    def input_bits(self, layer: Layer, bits: int | None = None) -> int:
        """The bits of a layer's input: by the recipe, or if its unit gets `bits`."""

        def of(name: str) -> int:
            if bits is None or not self.activations or name in self._held:
                return self._quantizers[name].spec.bits
            return self._reduce_bits(max(bits, self.recipe.output_bits) if name in self._outputs else bits)

        return max((of(name) for name in layer.inputs), default=FLOAT_BITS)

    def _reduce_bits(self, bits: int) -> int:
        return 7 if bits == 8 and self.recipe.reduce_range else bits

    def cost(self, unit: Unit, candidate: Candidate) -> tuple[int, int]:
        """(bits of the weights, MACs x bits of the weights x bits of the inputs)."""
        bits = FLOAT_BITS if candidate == "float" else candidate
        size = sum(layer.parameters * bits for layer in unit.layers)
        if candidate == "float":
            return size, sum(layer.macs * bits * bits for layer in unit.layers)
        return size, sum(layer.macs * bits * self.input_bits(layer, bits) for layer in unit.layers)

    def fixed_cost(self) -> tuple[int, int]:
        """`cost` of the layers that are not varied."""
        bits = {layer: self._quantizers[layer.weight].spec.bits for layer in self.fixed}
        size = sum(layer.parameters * bits[layer] for layer in self.fixed)
        return size, sum(layer.macs * bits[layer] * self.input_bits(layer) for layer in self.fixed)

    def recipe_of(self, choice: Mapping[Unit, Candidate]) -> Recipe:
        """The recipe with an override for each weight, each input and each layer that stays float."""
        own: dict[str, Any] = {
            re.escape(layer.module): FLOAT
            for unit, candidate in choice.items()
            if candidate == "float"
            for layer in unit.layers
        }
        recipe = self._with(own)
        # A layer in float changes which quantizers surround it, so look them up in the new plan.
        plan = dataclasses.replace(self._plan, float_paths=recipe.float_paths(self._types))
        annotation = plan.annotate(self._traced)
        found = {layer.weight: layer for layer in read_layers(self._traced.program, annotation, self._batch)}
        widest: dict[str, int] = {}
        for unit, candidate in choice.items():
            if candidate == "float":
                continue
            for layer in unit.layers:
                # A table with a scale per row keeps these scales.
                table = layer.weight in self._plan.by_row
                spec = (self._quantizers[layer.weight].spec if table else self.recipe.weights).replace(bits=candidate)
                own[re.escape(layer.weight)] = Override(weights=spec)
                for name in found[layer.weight].inputs if self.activations else ():
                    least = self.recipe.output_bits if name in annotation.output_names else 0
                    widest[name] = max(widest.get(name, least), candidate)
        widest = {name: bits for name, bits in widest.items() if name not in self._held}
        # A quantizer often has the name of its module. An override of it then also covers the quantizers inside the
        # module, so these get overrides with their own specs. Longer names come later and so take precedence.
        for name, place in annotation.places().items():
            inside = place.kind != "weight" and any(path in widest for path in ancestors(place.module))
            if inside and name not in widest and name in self._quantizers:
                widest[name] = self._quantizers[name].spec.bits
        for name in sorted(widest, key=lambda name: (name.count("/"), len(name), name)):
            spec = target_of(self.recipe.target).with_bits(self.recipe.activations, widest[name])
            own[re.escape(name)] = Override(activations=spec)
        return self._with(own)

    def _with(self, own: Mapping[str, Any]) -> Recipe:
        kept = {key: value for key, value in self.recipe.overrides.items() if key not in own}
        return dataclasses.replace(self.recipe, overrides={**kept, **own})


def _groups(layers: Sequence[Layer], *, shared: bool) -> list[list[Layer]]:
    """The layers one by one, or grouped by the tensor that they read."""
    groups: list[list[Layer]] = []
    for layer in layers:
        joined = [g for g in groups if shared and any(set(layer.inputs) & set(other.inputs) for other in g)]
        merged = [*(one for group in joined for one in group), layer]
        groups = [group for group in groups if group not in joined]
        groups.append(merged)
    return groups
