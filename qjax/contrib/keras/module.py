"""Wraps a Keras 3 model as an `nnx.Module`, so that quantizing, training and converting deal with nnx only.

The variables of the Keras model become nnx variables under the names of their layers. A call runs the model in a
`keras.StatelessScope` that holds them. While it runs, `keras_calls` opens a scope with the path of every layer, and
binds markers for the layers of `MARKED`.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from qjax.contrib.keras.calls import intercepted
from qjax.contrib.keras.layers import marked
from qjax.layers.function import put
from qjax.support.batches import brief
from qjax.support.names import lengthened


@dataclasses.dataclass(eq=False)
class Keras:
    """The static side of a wrapped Keras model, compared by identity.

    model: the user's model, which is read but never changed. variables: (Keras variable, path of the nnx variable).
    paths: id of a layer -> its path. types: path -> class, "" for the model itself.
    """

    model: Any
    variables: tuple[tuple[Any, tuple[str, ...]], ...]
    paths: dict[int, str]
    types: dict[str, type]


class KerasVariables(nnx.Module):
    """The variables of one layer, and of the layers within it."""


class KerasModule(KerasVariables):
    """The module that `from_keras` returns."""

    def __init__(self, held: Keras) -> None:
        self.qjax_keras = held
        self.deterministic = False

    @property
    def qjax_types(self) -> Mapping[str, type]:
        """Path of a layer -> its class, for overrides by type."""
        return self.qjax_keras.types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import keras

        held = self.qjax_keras
        options = {"training": not self.deterministic, **kwargs}
        mapping = [(variable, self.variable(place)[...]) for variable, place in held.variables]
        scope = keras.StatelessScope(state_mapping=mapping)
        before = [scope.get_current_value(variable) for variable, _ in held.variables]
        with scope, intercepted(marked(str(getattr(self, "qjax_path", "")), held.paths, held.types)):
            output = held.model(*_inputs(held.model, args), **options)
        for (variable, place), old in zip(held.variables, before, strict=True):
            new = scope.get_current_value(variable)
            if new is not old:
                self.variable(place)[...] = new
        return output

    def update_keras(self) -> Any:
        """Copy the variables into the Keras model that `from_keras` was given, and return that model."""
        for variable, place in self.qjax_keras.variables:
            variable.assign(jnp.copy(self.variable(place)[...]))
        return self.qjax_keras.model

    def variable(self, place: Sequence[str]) -> Any:
        """The nnx variable at a path."""
        return functools.reduce(getattr, place, self)


def from_keras(model: Any) -> nnx.Module:
    """Wrap a Keras 3 model as an `nnx.Module`, which `qjax.quantize` takes.

    It takes sequential, functional, subclassed and nested models and single layers, on Keras's JAX backend. Paths are
    the names of the layers: "encoder/dense_1/kernel". Overrides take these paths, and Keras's classes:
    `{keras.layers.Dense: qjax.QSpec(bits=4, axis=-1)}`. Trainable weights are `nnx.Param`; moving statistics are
    `nnx.BatchStat`, and are updated in training mode. Like any nnx module it starts in training mode; `train()` and
    `eval()` switch the mode. The Keras model itself is not changed.

    Args:
      model: a built `keras.Model` or `keras.Layer`.

    Returns:
      A module. It takes what the Keras model takes: an array, a dict by the names of the inputs, or a list; several
      inputs also as several arguments. `model.update_keras()` copies the trained variables into the Keras model, and
      returns it. After `qmodel = qjax.quantize(model, recipe, x)` the module is `qmodel.model`.

    Raises:
      TypeError: `model` is not a model of Keras 3. ValueError: Keras runs on another backend than JAX; the model is not
        built; Keras has quantized it; a recurrent layer is stateful.

        qmodel = qjax.quantize(qjax.from_keras(keras_model), qjax.Recipe(), x)

    Examples:
      ```python
      import keras

      net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu")])
      qmodel = qjax.quantize(qjax.from_keras(net), qjax.Recipe(), x)
      ```
    """
    _check(model)
    held = Keras(model, (), {}, {})
    found: list[tuple[Any, tuple[str, ...], type[nnx.Variable[Any]]]] = []
    trainable = {id(variable) for variable in model.trainable_variables}
    _walk(model, (), held, trainable, found, set())
    held.variables = tuple((variable, place) for variable, place, _ in found)
    module = KerasModule(held)
    for variable, place, kind in found:
        # Copy, because XLA deletes the model's own arrays when Keras trains the model.
        put(module, place, kind(jnp.copy(variable.value)), KerasVariables)
    return module


# ---------------------------------------------------------------------- the layers and their variables


def _walk(
    layer: Any,
    path: tuple[str, ...],
    held: Keras,
    trainable: set[int],
    found: list[tuple[Any, tuple[str, ...], type[nnx.Variable[Any]]]],
    seen: set[int],
) -> None:
    """Name a layer, the layers within it, and their variables; what is shared belongs to the first place found."""
    import keras

    held.paths[id(layer)] = "/".join(path)
    held.types["/".join(path)] = type(layer)
    names: set[str] = set()
    for child in _children(layer):
        if id(child) in held.paths or isinstance(child, keras.layers.InputLayer):
            continue
        name = child.name if child.name not in _RESERVED else f"{child.name}_"
        name = lengthened(name, names)
        names.add(name)
        _walk(child, (*path, name), held, trainable, found, seen)
    for variable in layer.variables:
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        name = variable.name if variable.name not in _RESERVED else f"{variable.name}_"
        name = lengthened(name, names)
        names.add(name)
        moves = isinstance(layer, keras.layers.BatchNormalization)
        kind = nnx.Param if id(variable) in trainable else nnx.BatchStat if moves else nnx.Variable
        found.append((variable, (*path, name), kind))


def _children(layer: Any) -> Iterator[Any]:
    """The direct children of a layer, in the order in which they were set."""
    import keras

    if isinstance(layer, keras.Model):
        yield from layer.layers
        return
    for value in vars(layer).values():
        for item in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, keras.Layer)):
            if isinstance(item, keras.Layer):
                yield item


_RESERVED = frozenset(dir(KerasModule)) | {"deterministic", "qjax_keras", "qjax_path"}
"""Attributes of the module itself, which layers may not overwrite."""


def _inputs(model: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in the form that the model takes: a functional model takes its inputs as one list or dict."""
    structure = getattr(model, "input", None) if hasattr(model, "inputs") else None
    if not isinstance(structure, (list, tuple)) or len(structure) < 2:
        return args
    if len(args) == len(structure):
        return (list(args),)
    if len(args) == 1 and isinstance(args[0], Mapping):
        given = cast("Mapping[str, Any]", args[0])
        names = [tensor.name for tensor in structure]
        if set(given) == set(names):
            return ([given[name] for name in names],)
    return args


def _check(model: Any) -> None:
    keras = sys.modules.get("keras")
    kind = type(model)
    if any("tf_keras" in base.__module__ or "tensorflow." in base.__module__ for base in kind.__mro__):
        raise TypeError(
            f"from_keras: expected a model of Keras 3, got the Keras 2 model {kind.__name__}. Save it, and load it "
            "with Keras 3: keras.saving.load_model(path), under KERAS_BACKEND=jax."
        )
    if keras is None or not isinstance(model, keras.Layer):
        cure = " For a function of parameters use qjax.from_function." if callable(model) else ""
        raise TypeError(f"from_keras: expected a keras.Model or keras.Layer of Keras 3, got {brief(model)}.{cure}")
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"from_keras: expected Keras on its JAX backend, got the backend {keras.backend.backend()!r}. "
            'Set the environment variable KERAS_BACKEND to "jax" before Keras is imported. Weights and .keras files '
            "are the same under every backend."
        )
    if not model.built:
        raise ValueError(
            f"from_keras: expected a built model, got {model.name!r}, which has no weights yet. Call it once on a "
            "batch, model(x), or start it with keras.Input(shape)."
        )
    layers = [model]
    while layers:
        layer = layers.pop()
        if layer.quantization_mode is not None:
            raise ValueError(
                f"from_keras: expected a float model, but Keras has quantized the layer {layer.name!r} "
                f"({layer.quantization_mode}). Use the model as it was before model.quantize(...)."
            )
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"from_keras: expected layers without state, got {layer.name!r} with stateful=True. It keeps numbers "
                "of one batch between calls, which a graph cannot do. Make the states inputs and outputs of the model: "
                "build it with return_state=True, and call the layer with initial_state=[...]. The weights are the "
                "same."
            )
        layers += _children(layer)
