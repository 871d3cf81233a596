"""Training the Keras way: `compile`, `fit`, `evaluate`, `predict`, callbacks, `save` on a quantized model."""

import os
from typing import TYPE_CHECKING, Any

from qjax.contrib.keras.module import KerasModule
from qjax.model.quantized_model import QuantizedModel, check_quantized

if TYPE_CHECKING:
    from qjax.contrib.keras.trainer import KerasTrainer


def to_keras(qmodel: QuantizedModel, *, exact: Any = None) -> "KerasTrainer":
    """Return a `keras.Model` that trains a quantized model: its weights and the scales of its quantizers.

    Everything of `keras.Model` works: `compile`, `fit` with callbacks and metrics, `evaluate`, `predict`, `save`
    (read with `qjax.load_keras`), `save_weights`, `load_weights`. Regularizers and constraints of the Keras layers stay
    in force. Training runs the fake-quantized forward in training mode, `evaluate` and `predict` run it in evaluation
    mode.

    Args:
      qmodel: the result of `qjax.quantize(qjax.from_keras(model), ...)`. Reading `trainer.qmodel` copies the trained
        values into it.
      exact: a sample, as for `qjax.exact`. `evaluate` and `predict` then compute the integers of the graph, bit for
        bit.

    Returns:
      A `keras.Model`. `trainer.qmodel` is the quantized model with the trained values, in evaluation mode, for
      `qjax.convert` and `qjax.verify`. `trainer.qmodel.model.update_keras()` copies them into the float model.

    Raises:
      TypeError: the model is not quantized, or `from_keras` did not make it.

        trainer = qjax.to_keras(qmodel)
        trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        trainer.fit(x, y, epochs=3)
        graph = qjax.convert(trainer.qmodel, x)

    Examples:
      ```python
      import keras

      net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
      trainer = qjax.to_keras(qjax.quantize(qjax.from_keras(net), qjax.Recipe(), x))
      trainer.compile(
          optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      )
      trainer.fit(x, labels, epochs=1, verbose=0)
      graph = qjax.convert(trainer.qmodel, x)
      ```
    """
    check_quantized(qmodel, "to_keras")
    if not isinstance(qmodel.model, KerasModule):
        raise TypeError(
            "to_keras: expected a quantized model that qjax.from_keras made, got one of "
            f"{type(qmodel.model).__name__}. Train another module with nnx.Optimizer, see docs/how-to/train.md."
        )
    from qjax.contrib.keras.trainer import KerasTrainer

    return KerasTrainer(qmodel, exact=exact)


def load_keras(path: str | os.PathLike[str], **options: Any) -> "KerasTrainer":
    """Load the trainer that `trainer.save(path)` stored: float model, quantizers, trained values, optimizer.

    Args:
      path: of a `.keras` file. options: for `keras.saving.load_model`, such as `custom_objects` for own layers.

    Raises:
      TypeError: the file holds another Keras model.

    Examples:
      ```python
      import keras

      net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
      trainer = qjax.to_keras(qjax.quantize(qjax.from_keras(net), qjax.Recipe(), x))
      trainer.compile(optimizer="adam", loss="mse")
      trainer.save("trainer.keras")
      trainer = qjax.load_keras("trainer.keras")
      ```
    """
    import keras

    from qjax.contrib.keras.trainer import KerasTrainer

    model = keras.saving.load_model(path, **options)
    if not isinstance(model, KerasTrainer):
        raise TypeError(
            f"load_keras: expected a file that the trainer of qjax.to_keras has saved, but {path} holds a "
            f"{type(model).__name__}. To load a float model, use qjax.from_keras(keras.saving.load_model(path))."
        )
    return model
