"""The `keras.Model` of `qjax.to_keras`. It imports Keras, so qjax imports this module only on demand."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
from flax import nnx

from qjax.api.exact import exact as exact_forward
from qjax.api.workflow import with_plan
from qjax.contrib.keras.module import from_keras
from qjax.contrib.keras.plan_json import decode, encode
from qjax.layers import instrument
from qjax.model.quantized_model import QuantizedModel


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
