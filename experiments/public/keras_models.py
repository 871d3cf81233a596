"""The families of `keras.applications`, each in its smallest form, with random weights and small images."""

import functools
import os
from typing import Any

import jax

import qjax
from experiments.public.models import Public, Source, normal

# name -> (the side of the image, options of the constructor)
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {"minimalistic": False}),
    "EfficientNetB0": (32, {}),
    "EfficientNetV2B0": (32, {}),
    "ResNet50": (32, {}),
    "ResNet50V2": (32, {}),
    "ConvNeXtTiny": (32, {}),
    "DenseNet121": (32, {}),
    "InceptionV3": (75, {}),
    "InceptionResNetV2": (75, {}),
    "NASNetMobile": (32, {}),
    "VGG16": (32, {}),
    "VGG19": (32, {}),
    "Xception": (71, {}),
}


def _network(name: str) -> Public:
    import keras

    side, options = _MODELS[name]
    keras.utils.set_random_seed(0)
    # the top of VGG and ConvNeXt would be most of the parameters
    made: Any = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(side, side, 3), **options
    )
    # images as these models take them, some of which rescale 0 to 255 themselves
    images = 255 * jax.nn.sigmoid(normal(2, side, side, 3))
    return Public(qjax.from_keras(made), None, (images,))


def _text() -> Public:
    """keras.io, "Bidirectional LSTM on IMDB", in little."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    made = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(50, 8),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    return Public(qjax.from_keras(made), None, (jax.random.randint(jax.random.key(0), (2, 6), 0, 50),))


def _series() -> Public:
    """keras.io, "Timeseries classification with a Transformer model", in little."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    inputs: Any = keras.Input((12, 4))
    x = layers.LayerNormalization(epsilon=1e-6)(inputs)
    x = layers.MultiHeadAttention(key_dim=4, num_heads=2, dropout=0.1)(x, x)
    x = layers.Dropout(0.1)(x) + inputs
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    y = layers.Conv1D(4, 1, activation="relu")(y)
    y = layers.Conv1D(4, 1)(layers.Dropout(0.1)(y)) + x
    y = layers.GlobalAveragePooling1D(data_format="channels_last")(y)
    return Public(qjax.from_keras(keras.Model(inputs, layers.Dense(3)(y))), None, (normal(2, 12, 4),))


def _mixer() -> Public:
    """keras.io, "Image classification with modern MLP models": the mixer, in little."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    inputs: Any = keras.Input((8, 8, 3))
    x = layers.Reshape((16, 6))(layers.Conv2D(6, 2, strides=2)(layers.Rescaling(1 / 255)(inputs)))
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization(epsilon=1e-6)(x))
        y = layers.Dense(16)(layers.Dense(8, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(6)(layers.Dense(12, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x)))
        x = layers.Add()([x, y])
    outputs = layers.Dense(3)(layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x)))
    return Public(qjax.from_keras(keras.Model(inputs, outputs)), None, (255 * jax.nn.sigmoid(normal(2, 8, 8, 3)),))


def _vision() -> Public:
    """keras.io, "Image classification with Vision Transformer", in little."""
    import keras
    from keras import layers, ops

    keras.utils.set_random_seed(0)

    class Patches(layers.Layer):
        """Squares of the image as rows, as the example writes them."""

        def call(self, images: Any) -> Any:
            rows: Any = ops.image.extract_patches(images, size=2)
            return ops.reshape(rows, (-1, rows.shape[1] * rows.shape[2], rows.shape[3]))

    class Encoder(layers.Layer):
        """Projected patches with a vector for each position."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.projection = layers.Dense(width)
            self.position = layers.Embedding(16, width)

        def build(self, input_shape: Any) -> None:
            self.projection.build(input_shape)
            self.position.build()
            super().build(input_shape)

        def call(self, patch: Any) -> Any:
            return self.projection(patch) + self.position(ops.expand_dims(ops.arange(0, 16), 0))

    inputs: Any = keras.Input((8, 8, 3))
    x = Encoder(8)(Patches()(inputs))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1)(y, y), x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        y = layers.Dropout(0.1)(layers.Dense(16, activation=keras.activations.gelu)(y))
        x = layers.Add()([layers.Dropout(0.1)(layers.Dense(8, activation=keras.activations.gelu)(y)), x])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    return Public(qjax.from_keras(keras.Model(inputs, layers.Dense(3)(x))), None, (normal(2, 8, 8, 3),))


def _audio() -> Public:
    """A spectrogram through convolutions and a GRU, as in keras.io's examples of audio, in little."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    steps = [
        layers.Reshape((10, 8, 1)),
        layers.Conv2D(4, (3, 4), strides=(1, 2), padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Reshape((10, 16)),
        layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        layers.Dropout(0.5),
        layers.Dense(8, activation="relu"),
        layers.Dense(5, activation="softmax"),
    ]
    return Public(qjax.from_keras(keras.Sequential([keras.Input((10, 8)), *steps])), None, (normal(2, 10, 8),))


def source() -> Source:
    """Every model by name; needs `qjax-quant[keras]`."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras as keras

    found: Source = {f"keras {name}": functools.partial(_network, name) for name in _MODELS}
    written = {"text": _text, "time series": _series, "mixer": _mixer, "vision transformer": _vision, "audio": _audio}
    return {**found, **{f"keras.io {name}": build for name, build in written.items()}}
