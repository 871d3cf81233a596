"""The quantized model: the user's module, the plan of its quantizers, and their numbers."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from qjax.assign.backend import target_of
from qjax.calibration.cautions import blind_message
from qjax.calibration.learned import Quantizer
from qjax.calibration.seen import Blind, flat_values
from qjax.layers import Traced, trace
from qjax.model.call import Call
from qjax.model.compiled_call import compiled
from qjax.model.fingerprint import compare, fingerprint, rows
from qjax.model.quantizer_numbers import QuantizerNumbers
from qjax.model.summary import quantizer_table
from qjax.numerics.affine import QParams
from qjax.numerics.gradient_codes import Gradients
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.meshes import automatic, explicit_mesh
from qjax.numerics.qspec import QSpec
from qjax.ops import Quantized
from qjax.ops.dynamic import DynamicProduct
from qjax.ops.formatted import FormattedProduct
from qjax.recipe.keys import ancestors
from qjax.recipe.recipe import Dynamic, Recipe, WeightFormat
from qjax.support.batches import brief, refuse_trace, traced_message
from qjax.support.extensions import profiles
from qjax.support.progress import stage
from qjax.support.tables import Summary
from qjax.support.transfers import with_transfers
from qjax.support.user_frames import users_level
from qjax.tracing import (
    Annotation,
    Equation,
    Integers,
    Place,
    Value,
    annotate,
    flag_roots,
    made_of,
    observed,
    sunk,
    whole_of,
    with_adapters_within,
    with_dynamic,
    with_integers,
    with_lookups,
    with_own_quantizers,
    without_unread,
)

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution of a module under `Dynamic` or a `WeightFormat`.

    name: of the weight. module: its path. op: "dot" or "conv". shape: of the weight. setting: how it is computed.
    scales: which weights share a scale.
    """

    name: str
    module: str
    op: str
    shape: tuple[int, ...]
    setting: Dynamic | WeightFormat
    scales: str

    @classmethod
    def of(cls, eqn: Equation, product: DynamicProduct | FormattedProduct, origins: Mapping[Value, str]) -> "Product":
        """The product that an equation became. origins: constant -> the path of its parameter."""
        op = "conv" if product.eqn.primitive == "conv_general_dilated" else "dot"
        shape = tuple(product.eqn.in_shapes[product.weight])
        names = [origins[value] for value in eqn.inputs if value in origins]
        name = names[0] if names else f"{eqn.scope}/{op}".removeprefix("/")
        weights = product.weights if isinstance(product, DynamicProduct) else product.setting
        size = weights.group_size if isinstance(weights, QSpec) else weights.group
        whole = isinstance(product, FormattedProduct) and size == product.layout.summed
        tensor = weights.axis is None if isinstance(weights, QSpec) else weights.is_integer
        parts = [] if tensor else ["per channel"]
        parts += [f"groups of {size}"] if size is not None and not whole else []
        return cls(name, eqn.scope, op, shape, product.setting, ", ".join(parts) or "per tensor")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `quantize` decided, fixed for the life of the model; hashable.

    quantizers: name -> quantizer. float_paths: modules that stay float. details: name -> (kind, module, op, shape).
    dynamic: modules whose products find scales at run time or use a weight format, and exceptions within them (None).
    integers: the ranges of the integers of which the model computes functions. by_row: the quantizers of tables with
    a scale per row. adapters: see `Recipe`; "merged" means that they are zero and left out. profile: the name of the
    device, or None. products: the products that `dynamic` covers. gradients: see `Recipe`. blind: the quantizers that
    were calibrated on a single number.
    """

    quantizers: tuple[tuple[str, Quantizer], ...]
    float_paths: frozenset[str]
    details: tuple[tuple[str, tuple[Any, ...]], ...]
    target: Any
    observers: tuple[tuple[str, Any], ...]
    shared: frozenset[str] = frozenset()
    dynamic: tuple[tuple[str, Dynamic | WeightFormat | None], ...] = ()
    integers: tuple[Integers, ...] = ()
    by_row: frozenset[str] = frozenset()
    adapters: Literal["beside", "within", "merged"] = "beside"
    profile: str | None = None
    blind: tuple[Blind, ...] = ()
    products: tuple[Product, ...] = ()
    gradients: Gradients | None = None

    @functools.cached_property
    def by_name(self) -> Mapping[str, Quantizer]:
        """The quantizers by name."""
        return dict(self.quantizers)

    @functools.cached_property
    def fingerprint(self) -> np.ndarray:
        """The fingerprint that the state of a model with this plan holds, see `qjax.model.fingerprint`."""
        return rows(self.by_name)

    @functools.cached_property
    def expected(self) -> str:
        """The float inputs of the sample that the model was quantized with, for messages."""
        inputs = [f"{name} of shape {shape}" for name, (kind, _, _, shape) in self.details if kind == "input"]
        return f"The model was quantized with {', '.join(inputs)}." if inputs else ""

    def formula_of(self, place: Place) -> InputQuantization:
        """The formula by which a tensor gets its codes.

        A runtime quantizes the model's inputs by a formula of its own. All later tensors arrive as codes.
        """
        return target_of(self.target).quantize if place.kind == "input" else "reciprocal"

    def is_float(self, path: str) -> bool:
        """Whether everything inside a module stays float."""
        return "" in self.float_paths or any(path in self.float_paths for path in ancestors(path))

    @functools.cached_property
    def _settings(self) -> Mapping[str, Dynamic | WeightFormat | None]:
        return dict(self.dynamic)

    def setting_of(self, scope: str) -> Dynamic | WeightFormat | None:
        """How the products of a module run: a `Dynamic`, a `WeightFormat`, or None for neither."""
        return next((self._settings[path] for path in (*ancestors(scope), "") if path in self._settings), None)

    def read(self, traced: Traced) -> tuple[Traced, Annotation]:
        """A trace with the products of `dynamic` rewritten as the recipe asks, and the places of its quantizers."""
        with automatic(explicit_mesh(traced.args)):
            return self._read(traced)

    def _read(self, traced: Traced) -> tuple[Traced, Annotation]:
        program = sunk(traced.program)
        if self.adapters != "beside":
            program = with_adapters_within(program, traced.adapters, dropped=self.adapters == "merged")
        if self.dynamic:
            left = made_of(program, traced.adapters)
            program = with_dynamic(program, self.setting_of, left, target_of(self.target).dynamic)
        program = with_lookups(program, self.is_float)
        traced = dataclasses.replace(traced, program=without_unread(program))
        ranges = {known.name: known for known in self.integers}
        traced = dataclasses.replace(traced, program=with_integers(traced.program, traced.names, ranges))
        annotation = self.annotate(traced)
        program = with_own_quantizers(traced.program, annotation)
        if program is traced.program:
            return traced, annotation
        traced = dataclasses.replace(traced, program=program)
        return traced, self.annotate(traced)

    def with_ranges(self, traced: Traced, declared: Sequence[Integers] = ()) -> "Plan":
        """The plan with a range for every integer tensor of which a trace of the model computes a function.

        A range that the recipe does not declare covers the integers of this call and of all earlier ones.
        """

        def parts_spelled(name: str) -> set[str]:
            whole = whole_of(name)
            return {*traced.spellings(name), *(own + name[len(whole) :] for own in traced.spellings(whole))}

        known = {own.name: own for own in self.integers}
        seen = observed(traced.program, traced.args, traced.names)
        for name, bounds in seen.items():
            whole = whole_of(name)
            chosen = next((own for own in declared if own.name in parts_spelled(name)), None)
            argument = next((own for own in declared if own.name in traced.spellings(whole)), None)
            if chosen is None and argument is not None:
                # The range holds for all parts, and it is checked on the argument itself.
                known[whole] = dataclasses.replace(argument, name=whole)
            chosen = chosen or argument
            if chosen is not None:
                known[name] = dataclasses.replace(chosen, name=name)
            elif isinstance(bounds, Tracer):
                # The numbers are unknown inside a trace, and any range will do to find the structure.
                known.setdefault(name, Integers(name, 0, 1, declared=False))
            elif name not in known or not known[name].declared:
                known[name] = widened(known.get(name), name, np.asarray(bounds))
        inputs_of = dict(zip(traced.program.inputs, traced.names, strict=True))
        for root, eqn in flag_roots(traced.program):
            if root in inputs_of:
                name = inputs_of[root]
                if any(own.name in traced.spellings(name) and (own.low < 0 or own.high > 2) for own in declared):
                    raise ValueError(
                        f"Recipe: integers {name!r} are a mask of 0 and 1 ({eqn.location}). Leave out their range."
                    )
                known[name] = Integers(name, 0, 2)
                known[name].check(name, traced.args[traced.names.index(name)])
        values = zip(traced.names, traced.program.inputs, traced.constant, strict=True)
        whole = [name for name, value, state in values if not state and not value.is_float]
        inputs = {spelling for name in whole for spelling in traced.spellings(name)}
        for own in declared:
            if own.name not in inputs and not any(own.name in parts_spelled(name) for name in seen):
                raise ValueError(
                    f"Recipe: expected an integer input of this model in integers, got {own.name!r}. Integer inputs: "
                    f"{', '.join(sorted(map(repr, inputs))) or 'none'}."
                )
        return dataclasses.replace(self, integers=tuple(known.values()))

    def check_integers(self, traced: Traced) -> None:
        """Raise where integers of a call are out of their range, as far as their numbers are known."""
        for known in self.integers:
            if known.name in traced.names:
                known.check(known.name, traced.args[traced.names.index(known.name)])

    def annotate(self, traced: Traced) -> Annotation:
        """Find the places of the quantizers in a trace of the model.

        Raises:
          TypeError: integers or booleans for an input that was float in the sample.
        """
        given = dict(zip(traced.names, traced.args, strict=True))
        for name, (kind, *_) in self.details:
            if kind == "input" and name in given and not jnp.issubdtype(given[name].dtype, jnp.floating):
                raise TypeError(
                    f"Input {name!r}: expected floats, as in the sample that the model was quantized with, got "
                    f"{given[name].dtype}. Convert it as for training (for images, x.astype(np.float32) / 255), or "
                    "quantize with a sample of this type."
                )
        return annotate(
            traced.program, traced.names, traced.constant, self.is_float, target_of(self.target), self.by_row
        )

    def check_known(self, annotation: Annotation) -> None:
        """Raise where a call has tensors without a quantizer, because the sample took another path in the model."""
        known = self.by_name
        for name, place in annotation.places().items():
            if name not in known:
                where = f" ({place.location})" if place.location else ""
                near = difflib.get_close_matches(name, known, n=2)
                raise ValueError(
                    f"This call has a tensor {name!r}{where} that was not there when the model was quantized. "
                    f"{len(known)} quantizers are known{', among them ' if near else ''}{', '.join(near)}. The model's "
                    "structure must not depend on the call. Give arguments of the sample's dtypes (uint8 images are no "
                    "float images). A loop over the examples in Python accepts the sample's batch only (jax.vmap and "
                    "jax.lax.map accept any). Or call qjax.quantize with a sample that takes this path."
                )


def unquantized(recipe: Recipe, types: Mapping[str, type]) -> Plan:
    """The plan that a recipe implies for a model before it has quantizers. types: module path -> class."""
    profile = None if recipe.profile is None else profiles().get(recipe.profile).name
    dynamic = recipe.dynamic_paths(types)
    return Plan(
        (),
        recipe.float_paths(types),
        (),
        recipe.target,
        (),
        dynamic=dynamic,
        adapters=recipe.adapters,
        profile=profile,
        gradients=recipe.gradients,
    )


class QuantizedModel(nnx.Module):
    """The user's model with fake quantization on the tensors of its plan.

    An ordinary `nnx.Module`: `train()`, `eval()`, `nnx.split`, optimizers and transforms apply. Calling it calls the
    user's `__call__`; the user's own parameters are under `model`, those of the quantizers under `quantizers`.

    Examples:
      ```python
      scores = qmodel(x)  # fake-quantized, as often as you train it
      print(qmodel.summary())  # every quantizer with its bits and scale
      float_model = qmodel.model  # the module with the parameters that train
      ```
    """

    post_training_report: Any = None
    """The report of `qjax.post_training`, step by step; None for a model that was quantized otherwise."""

    def __init__(self, model: nnx.Module, plan: Plan, quantizers: QuantizerNumbers) -> None:
        self.model = model
        self.plan = plan
        self.quantizers = quantizers
        self.fingerprint = fingerprint(plan.by_name)

    @with_transfers
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.blind:
            self.warn_if_blind("The call")
        with stage(f"{type(self.model).__name__} with {len(self.plan.quantizers)} quantizers: the first call compiles"):
            program = compiled(self, args, kwargs)
            if program is not None:
                self.check_state()
                if self.plan.integers:
                    self.trace(*args, **kwargs)  # the range of integers can be checked only where the numbers are known
                return program()
            call = self.trace(*args, **kwargs)
            evaluated = call.evaluate()
            call.write(evaluated)
        return evaluated.output

    def warn_if_blind(self, what: str) -> tuple[str, ...]:
        """Warn of the quantizers that were calibrated on a single number; returns their names.

        A quantizer whose numbers training or a checkpoint has changed since then no longer counts, but inside of a
        trace this is not known. what: the calling function, for the message.
        """
        still = tuple(blind for blind in self.plan.blind if self._is_still(blind))
        if still:
            warnings.warn(f"{what}: {blind_message(still)}", stacklevel=users_level())
        return tuple(blind.name for blind in still)

    def _is_still(self, blind: Blind) -> bool:
        values = self.quantizers[blind.name].values()
        if any(isinstance(value, Tracer) for value in values.values()):
            return True
        return flat_values(values) == blind.values

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("model")
        if not name.startswith("_") and hasattr(model, name):
            raise AttributeError(
                f"A QuantizedModel has no attribute {name!r}; the model inside it has: use qmodel.model.{name}."
            )
        raise AttributeError(f"A {type(self).__name__} has no attribute {name!r}.")

    @with_transfers
    def codes(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The output, and the int32 codes of every quantized tensor by its label (in scans "label[iteration]").

        A tensor of a loop over time also appears for all iterations at once, under the label without the last
        iteration, because a graph may compute it before the loop. Statistics are not updated.
        """
        call = self.trace(*args, **kwargs)
        annotation = call.annotation

        def record(place: Place, x: jax.Array, quantized: Quantized | None) -> jax.Array | None:
            if place.kind == "weight" or quantized is None:
                return None
            zero_point = quantized.qparams.integer_zero_point()
            return jnp.nan_to_num(quantized.codes).astype(jnp.int32) + zero_point

        evaluated = call.evaluate(record=record)
        taps = evaluated.recorded
        codes: dict[str, jax.Array] = {}
        started = [place for place in annotation.weights.values() if place.label in taps]
        for place in (*annotation.values.values(), *started):
            inner = len(place.stack)
            for depth in (inner, inner - 1) if inner - 1 in place.timed else (inner,):
                for index in np.ndindex(*place.stack[:depth]):
                    label = place.label + "".join(f"[{i}]" for i in index)
                    codes[label] = taps[place.label][index] if index else taps[place.label]
        return evaluated.output, codes

    def trace(self, *args: Any, **kwargs: Any) -> Call:
        """Trace a call without running it, for forward passes that differ from the model's own; see `Call`.

        Raises:
          TraceError: the model cannot be traced with these arguments.
          ValueError: the call has tensors without a quantizer, or integers outside of their range.
        """
        traced, annotation = self.plan.read(trace(self.model, args, kwargs, self.plan.expected))
        self.plan.check_known(annotation)
        self.plan.check_integers(traced)
        plan = self.plan
        return Call(traced, annotation, self.model, plan.shared, self._quantize, self.quantizer_values, plan.gradients)

    def quantizer_values(self) -> dict[str, dict[str, Any]]:
        """name -> the arrays that a quantizer works with, where learned log-scales are converted to scales."""
        self.check_state()
        return self.quantizers.ready(self.plan.by_name)

    def check_state(self) -> None:
        """Raise ValueError if the model's numbers were restored from a state of another plan; outside of `jit` only."""
        compare(self.fingerprint.get_metadata("quantizers"), self.plan.fingerprint, self.fingerprint.get_raw_value())

    @with_transfers
    def qparams(self) -> dict[str, QParams]:
        """name -> the present scale, zero point and spec; quantizers that follow their tensor are left out."""
        values = self.quantizer_values()
        return {name: q.qparams(values[name]) for name, q in self.plan.quantizers if not q.follows_tensor}

    def summary(self) -> Summary:
        """A table of every quantizer: name, place, codes and parameters."""
        return quantizer_table(self.plan, self.qparams())

    def _quantize(self, place: Place, params: Any, x: jax.Array) -> Quantized:
        return self.plan.by_name[place.name](params, x, self.plan.formula_of(place))


def widened(known: Integers | None, name: str, bounds: np.ndarray) -> Integers:
    """A range that covers the known range, 0, and the integers from bounds[0] to bounds[1]."""
    low, high = min(0, int(bounds[0])), int(bounds[1]) + 1
    if known is not None:
        low, high = min(low, known.low), max(high, known.high)
    return Integers(name, low, max(high, low + 1), declared=False)


def check_quantized(value: Any, what: str, *, numbers: bool = True) -> None:
    """Raise unless `value` is what `quantize` returned.

    Args:
      what: the name of the calling function, for messages.
      numbers: whether that function reads the model's numbers in Python.
    """
    if not isinstance(value, QuantizedModel):
        came = f"the float model {type(value).__name__}" if isinstance(value, nnx.Module) else brief(value)
        raise TypeError(
            f"{what}: expected a quantized model, got {came}. Quantize it first: qmodel = qjax.quantize(model, recipe, "
            "sample)."
        )
    if numbers:
        refuse_trace(what)
        value.check_state()
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(nnx.state(value))):
            raise TypeError(traced_message(what, "a model whose parameters JAX is tracing"))


def evaluation_copy(model: ModuleT) -> ModuleT:
    """A copy in evaluation mode; the original keeps its mode and its state."""
    copy = nnx.clone(model)
    copy.eval()
    return copy
