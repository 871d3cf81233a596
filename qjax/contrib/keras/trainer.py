"""The `keras.Model` of `qjax.to_keras`. It imports Keras, so qjax imports this module only on demand."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from flax import nnx

from qjax import calibration, targets
from qjax.api.exact import exact as exact_forward
from qjax.api.workflow import with_plan
from qjax.calibration.learned import Quantizer
from qjax.contrib.keras.module import from_keras
from qjax.layers import instrument
from qjax.model.quantized_model import Plan, Product, QuantizedModel
from qjax.numerics.affine import QSpec
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic
from qjax.support.batches import brief
from qjax.tracing import Integers

# ----------------------------------------------------------------------------------------------------------------------
# Converts a plan of quantizers, and the structure of a sample, to JSON values for the files of Keras models.

_OBSERVERS = tuple(type(calibration.get(name)) for name in calibration.names() if name != "callback")
_CLASSES = {
    cls.__name__: cls for cls in (Plan, Product, Quantizer, QSpec, Dynamic, WeightFormat, Integers, *_OBSERVERS)
}
"""The only classes that a file may name; reading creates no objects of other classes."""


def encode(value: Any) -> Any:
    """Convert a value of a plan or a sample for `json`. Of arrays only shape and dtype are stored.

    Raises:
      TypeError: the value has a class of the user's own, such as an observer with a function.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [encode(item) for item in cast("list[Any]", value)]}
    if isinstance(value, frozenset):
        return {"frozenset": sorted(cast("frozenset[str]", value))}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in cast("Mapping[Any, Any]", value).items()]}
    if isinstance(value, (jax.Array, np.ndarray)):
        return {"array": [list(value.shape), str(value.dtype)]}
    if isinstance(value, targets.Target) and value.name in targets.names() and value == targets.get(value.name):
        return value.name
    if _CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": type(value).__name__, "fields": fields}
    raise TypeError(
        f"save: a .keras file cannot hold {brief(value)} of the recipe. Use the names of targets, methods and "
        "observers; or save_weights, and quantize again with this recipe before load_weights."
    )


def decode(value: Any) -> Any:
    """Undo `encode`; arrays become zeros.

    Raises:
      ValueError: the value is not one that `encode` writes.
    """
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    if given.get("class") in _CLASSES:
        return _CLASSES[given["class"]](**{name: decode(item) for name, item in given["fields"].items()})
    kind, items = next(iter(given.items())) if len(given) == 1 else ("", [])
    if kind == "array":
        return jnp.zeros(*items)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    if kind in ("tuple", "list", "frozenset"):
        return {"tuple": tuple, "list": list, "frozenset": frozenset}[kind](map(decode, items))
    raise ValueError(f"load: expected a plan that this version of qjax has saved, got {brief(given)}.")


@keras.saving.register_keras_serializable(package="qjax")
class KerasTrainer(keras.Model):
    """A quantized model as Keras sees it: each nnx variable is a Keras variable, and `nnx.Param` are trainable."""

    def __init__(self, qmodel: QuantizedModel, *, exact: Any = None) -> None:
        wrapped: Any = qmodel.model
        held = wrapped.qjax_keras
        super().__init__(name=f"quantized_{held.model.name}")
        copy = nnx.clone(qmodel)
        copy.train()
        train, state = nnx.split(copy)
        copy.eval()
        evaluate, _ = nnx.split(copy)
        tree = jax.tree.structure(state)
        # Keras would track a dict or a list as state, but not a function.
        self._merged = lambda values, training: nnx.merge(train if training else evaluate, tree.unflatten(values))
        self._given = lambda: qmodel
        self._sample = lambda: exact
        self._exact = None if exact is None else exact_forward(copy, exact)
        origins = {"/".join(("model", *place)): variable for variable, place in held.variables}
        found = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]
        self._values = [
            self._added(path, variable, origins.get(path))
            for keys, variable in found
            for path in [jax.tree_util.keystr(keys, simple=True, separator="/")]
        ]
        self.built = True

    def _added(self, path: str, variable: Any, origin: Any) -> Any:
        """The Keras variable for an nnx variable; `origin` is the user's variable that it was made from."""
        value = variable[...]
        added = self.add_weight(
            shape=value.shape,
            dtype=str(value.dtype),
            initializer="zeros",
            trainable=isinstance(variable, nnx.Param),
            autocast=False,
            name=path.replace("/", "."),
            regularizer=None if origin is None else origin.regularizer,
            constraint=None if origin is None else origin.constraint,
        )
        # Copy, because training donates its arrays to XLA, which deletes them.
        added.assign(jnp.copy(value))
        return added

    def call(self, *inputs: Any, training: bool = False) -> Any:
        """The fake-quantized forward; in evaluation the exact one, if the trainer was made with a sample."""
        model = self._merged([variable.value for variable in self._values], training)
        if self._exact is not None and not training:
            return self._exact(model, *inputs)
        output = model(*inputs)
        if training:
            for variable, value in zip(self._values, jax.tree.leaves(nnx.state(model)), strict=True):
                if not variable.trainable:
                    variable.assign(value)
        return output

    def load_own_variables(self, store: Any) -> None:
        """Refuse values of another recipe now: `fit` and `predict` run under `jit`, where nothing is compared."""
        super().load_own_variables(store)
        self._merged([variable.value for variable in self._values], False).check_state()

    def get_config(self) -> dict[str, Any]:
        """The float model, the plan of its quantizers, and the structure of the sample, for `save`."""
        qmodel = self._given()
        model: Any = qmodel.model
        held = keras.saving.serialize_keras_object(model.qjax_keras.model)
        return {"model": held, "plan": encode(qmodel.plan), "exact": encode(self._sample())}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "KerasTrainer":
        """Rebuild what `get_config` described; the values come from the file's weights."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        qmodel = with_plan(instrument(from_keras(model)), decode(config["plan"]))
        return cls(qmodel, exact=decode(config["exact"]))

    @property
    def qmodel(self) -> QuantizedModel:
        """The quantized model with the present values, in evaluation mode."""
        qmodel = self._given()
        values = [jnp.copy(variable.value) for variable in self._values]
        nnx.update(qmodel, nnx.state(self._merged(values, False)))
        qmodel.eval()
        return qmodel
