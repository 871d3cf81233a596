"""Runs Keras layers in scopes with their paths, and turns some of them into one marked operation each.

Without a marker, a normalisation would be many operations, and batch normalisation would have other operations in
training than in evaluation. Each marker computes what the layer's own `call` computes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from qjax.contrib.keras.calls import Handler, bare
from qjax.layers.nnx_layers import look_up_rows
from qjax.tracing import SCOPE, Layer, bind


def marked(prefix: str, paths: Mapping[int, str], types: dict[str, type]) -> Mapping[tuple[type, str], Handler]:
    """The handlers for the calls of layers.

    Args:
      prefix: path of the model among nnx modules, with dots. paths: id of a layer -> its path.
      types: path -> class, to which the layers are added that a call creates.
    """
    import keras

    around: list[str] = []

    def scoped(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(layer))
        if path is None:
            path = "/".join(part for part in (around[-1] if around else "", layer.name) if part)
            types.setdefault(path, type(layer))
        around.append(path)
        try:
            with jax.named_scope(SCOPE + ".".join(part for part in (prefix, path.replace("/", ".")) if part)):
                return call(*args, **kwargs)
        finally:
            around.pop()

    layers = keras.layers
    # The class that makes the masks of all recurrent cells has no public name.
    masks: type = next(cls for cls in layers.LSTMCell.__mro__ if "get_dropout_mask" in vars(cls))
    noises = (layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise)
    return {
        **{(cls, "call"): _noise for cls in noises},
        (masks, "get_dropout_mask"): functools.partial(_cell_dropout, "dropout"),
        (masks, "get_recurrent_dropout_mask"): functools.partial(_cell_dropout, "recurrent_dropout"),
        # Use the loop of the base class even where these layers would call cuDNN.
        **{(cls, "inner_loop"): functools.partial(_loop, layers.RNN) for cls in (layers.GRU, layers.LSTM)},
        (keras.Layer, "__call__"): scoped,
        (layers.BatchNormalization, "call"): _batch_norm,
        (layers.Embedding, "call"): _embedding,
        (layers.GroupNormalization, "call"): _group_norm,
        (layers.LayerNormalization, "call"): _layer_norm,
        (layers.RMSNormalization, "call"): _rms_norm,
    }


def _batch_norm(layer: Any, call: Any, inputs: jax.Array, training: Any = None, mask: Any = None) -> Any:
    running = not (training and layer.trainable)
    if not isinstance(layer.axis, int):
        return call(inputs, training=training, mask=mask)
    names = {"moving_mean": "mean", "moving_variance": "var"}
    names |= ({"gamma": "scale"} if layer.scale else {}) | ({"beta": "bias"} if layer.center else {})
    variables = [getattr(layer, name) for name in names]
    moving = [] if running else list(layer.non_trainable_variables)
    if not running:
        # Statistics of renormalisation, which evaluation does not read.
        others = {v.name: v for v in moving if all(v is not variable for variable in variables)}
        names |= {name: name for name in others}
        variables += others.values()
    attributes: dict[str, Any] = {
        "epsilon": float(layer.epsilon),
        "trailing": inputs.ndim - 1 - layer.axis % inputs.ndim,
        "use_running_average": running,
    }
    if not running:
        operand = {id(variable): name for name, variable in zip(names.values(), variables, strict=True)}
        attributes["updated"] = tuple(operand[id(variable)] for variable in moving)
    # Evaluation does not read the mask.
    masks = {} if running or mask is None else {"mask": mask}
    function = _pure(functools.partial(call, training=not running), variables, moving, masks)
    operands = ("x", *names.values(), *masks)
    bound = Layer("batch_norm", operands, tuple(sorted(attributes.items())), function)
    y, *statistics = bind(bound, inputs, *(variable.value for variable in variables), *masks.values())
    for variable, value in zip(moving, statistics, strict=True):
        variable.assign(value)
    return y


def _noise(layer: Any, call: Any, inputs: jax.Array, training: Any = False) -> Any:
    """Noise in training, as one operation that keeps the quantization parameters of its input."""
    generator = getattr(layer, "seed_generator", None)
    if not training or generator is None:
        return call(inputs, training=training)
    function = _pure(functools.partial(call, training=True), [generator.state], [generator.state])
    bound = Layer("dropout", ("x", "seed"), (("noise", True),), function)
    y, seed = bind(bound, inputs, generator.state.value)
    generator.state.assign(seed)
    return y


def _loop(base: Any, layer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    return base.inner_loop(layer, *args, **kwargs)


class _Mask:
    """The dropout mask of a recurrent cell, which is made outside of the loop and applied inside it as `x * mask`."""

    def __init__(self, mask: jax.Array, rate: float) -> None:
        self.mask = mask
        self.rate = rate

    def __rmul__(self, x: jax.Array) -> jax.Array:
        bound = Layer("dropout", ("x", "mask"), (("rate", self.rate),), _times)
        return bind(bound, x, self.mask)[0]


def _times(x: jax.Array, mask: jax.Array) -> list[jax.Array]:
    return [x * mask]


def _cell_dropout(attribute: str, cell: Any, call: Any, step_input: Any) -> Any:
    found = call(step_input)
    rate = float(getattr(cell, attribute))
    if isinstance(found, list):
        return [_Mask(mask, rate) for mask in found]
    return None if found is None else _Mask(found, rate)


def _embedding(layer: Any, call: Any, inputs: jax.Array) -> Any:
    import keras

    if layer.input_dim == 1 or not jax.numpy.issubdtype(inputs.dtype, jax.numpy.integer):
        return call(inputs)
    table: Any = keras.ops.convert_to_tensor(layer.embeddings)
    return keras.ops.cast(look_up_rows(inputs, table), layer.compute_dtype)


def _layer_norm(layer: Any, call: Any, inputs: jax.Array) -> Any:
    if layer.rms_scaling:
        return call(inputs)
    axes = _axes(layer.axis, inputs)
    return _bind_norm("layer_norm", layer, call, inputs, {"gamma": "scale", "beta": "bias"}, axes, axes)


def _rms_norm(layer: Any, call: Any, inputs: jax.Array) -> Any:
    axes = _axes(layer.axis, inputs)
    return _bind_norm("rms_norm", layer, call, inputs, {"scale": "scale"}, axes, axes, center=False)


def _group_norm(layer: Any, call: Any, inputs: jax.Array) -> Any:
    last = inputs.ndim - 1
    if _axes(layer.axis, inputs) != (last,):
        return call(inputs)
    names = {"gamma": "scale", "beta": "bias"}
    axes = tuple(range(1, inputs.ndim))
    return _bind_norm("group_norm", layer, call, inputs, names, axes, (last,), groups=layer.groups)


def _bind_norm(
    op: str,
    layer: Any,
    call: Any,
    inputs: jax.Array,
    names: Mapping[str, str],
    axes: Sequence[int],
    features: Sequence[int],
    *,
    center: bool = True,
    groups: int = 1,
) -> jax.Array:
    held: dict[str, Any] = {name: getattr(layer, name, None) for name in names}
    variables = {names[name]: variable for name, variable in held.items() if hasattr(variable, "assign")}
    attributes = {
        "axes": tuple(axes),
        "center": center,
        "divisor": 0,
        "epsilon": float(layer.epsilon),
        "feature_axes": tuple(features),
        "groups": int(groups),
        "joined": "add",
    }
    function = _pure(call, list(variables.values()), [])
    bound = Layer(op, ("x", *variables), tuple(sorted(attributes.items())), function)
    (y,) = bind(bound, inputs, *(variable.value for variable in variables.values()))
    return y


def _pure(
    call: Callable[..., Any], variables: Sequence[Any], moving: Sequence[Any], names: Iterable[str] = ()
) -> Callable[..., list[Any]]:
    """A layer's call as a function of its input, its variables, and the arguments with these names.

    It returns the layer's output, and the new values of `moving`.
    """
    names = tuple(names)

    def function(x: jax.Array, *values: jax.Array) -> list[Any]:
        held, given = values[: len(variables)], values[len(variables) :]
        with bare(), _state(list(zip(variables, held, strict=True))) as scope:
            y = call(x, **dict(zip(names, given, strict=True)))
        return [y, *(scope.get_current_value(variable) for variable in moving)]

    return function


@contextlib.contextmanager
def _state(mapping: list[tuple[Any, Any]]) -> Iterator[Any]:
    import keras

    with keras.StatelessScope(state_mapping=mapping) as scope:
        yield scope


def _axes(axes: Any, x: jax.Array) -> tuple[int, ...]:
    """Axes counted from the front, in ascending order."""
    return tuple(sorted(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes)))
