"""A Keras model of handwritten digits, quantized after training and trained: `python -m experiments.keras_digits`.

Accuracy on held-out digits of the float model, of Keras's own post-training quantization (int8, int4, GPTQ), and of
qjax before and after a few epochs of `fit`; for qjax that of the integer graph, which must be what `predict` of the
trainer computes, bit for bit. Needs `qjax-quant[keras,demo]`.
"""

import contextlib
import io
import os
import sys
import warnings
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers

import qjax
from experiments.data import digits

EPOCHS, BATCH = 6, 64
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, strides=2),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(10),
        ]
    )


def accuracy(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.argmax(np.asarray(model(x)), 1) == y))


def trained(model: Any, rate: float, epochs: int, x: np.ndarray, y: np.ndarray) -> None:
    steps = epochs * -(-len(x) // BATCH)
    schedule: Any = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(schedule), LOSS)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)


def by_keras(model: Any, mode: str, x: np.ndarray, y: np.ndarray) -> float:
    """Keras's own post-training quantization: of the dense layers; a convolution stays in floats."""
    copy: Any = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy.quantize(mode)
    return accuracy(copy, x, y)


def by_gptq(model: Any, x: np.ndarray, test: tuple[np.ndarray, np.ndarray]) -> float:
    """Keras's GPTQ of the dense layers in 4 bits.

    It is written for language models, whose data are tokens: here the tokens are the pixels of the images, all of them
    one text, which a first layer puts together again.
    """
    copy: Any = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    tokens = np.round(16 * x).astype(np.int32)
    images = [layers.Lambda(lambda text: keras.ops.reshape(text, (-1, 8, 8, 1))), layers.Rescaling(1 / 16)]
    first = next(i for i, layer in enumerate(copy.layers) if isinstance(layer, layers.Dense))
    structure = {
        "pre_block_layers": [*images, *copy.layers[:first]],
        "sequential_blocks": [keras.Sequential(copy.layers[first:])],
    }
    config = keras.quantizers.GPTQConfig(
        dataset=[tokens],
        tokenizer=lambda text: text,
        num_samples=1,
        sequence_length=tokens.size,
        group_size=-1,
        quantization_layer_structure=structure,
    )
    # without the progress bar, which Keras prints between the rows
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        copy.quantize("gptq", config=config)
    return accuracy(copy, *test)


def by_qjax(model: Any, bits: int, x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray]) -> list[Any]:
    """Accuracy of the graph after calibration and after `fit`, and how many outputs differ from `predict`."""
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1), activations=qjax.QSpec(bits=bits, symmetric=False))
    qmodel = qjax.quantize(qjax.from_keras(model), recipe, x[:BATCH])
    qjax.calibrate(qmodel, [x[:512]])
    qmodel.eval()
    before = accuracy(qjax.convert(qmodel, x[:2]), *test)
    trainer: Any = qjax.to_keras(qmodel, exact=x[:2])
    trained(trainer, 2e-3, EPOCHS, x, y)
    graph: Any = qjax.convert(trainer.qmodel, x[:2])
    predicted = trainer.predict(test[0], batch_size=len(test[0]), verbose=0)
    differ = int(np.sum(np.asarray(graph(test[0])) != predicted))
    return [before, accuracy(graph, *test), differ]


def main() -> int:
    keras.utils.set_random_seed(0)
    data = digits()
    x, y, test = data.train_images, data.train_labels, (data.test_images, data.test_labels)
    model = network()
    trained(model, 5e-3, 15, x, y)
    print("| | after training | after `fit` with quantizers | outputs that differ from `predict` |")
    print("| --- | ---: | ---: | ---: |")
    print(f"| float | {accuracy(model, *test):.4f} | | |", flush=True)
    for mode in ("int8", "int4"):
        print(f'| `model.quantize("{mode}")` of Keras | {by_keras(model, mode, *test):.4f} | | |', flush=True)
    print(f"| GPTQ of Keras, weights of 4 bits | {by_gptq(model, x[:512], test):.4f} | | |", flush=True)
    failed = 0
    for bits in (8, 4, 3):
        before, after, differ = by_qjax(model, bits, x, y, test)
        print(f"| qjax, weights and activations of {bits} bits | {before:.4f} | {after:.4f} | {differ} |", flush=True)
        failed += differ
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
