"""The operators of float files, one file for each family; importing this package registers all of them.

A function takes a `Call` and the inputs of the node. The operators of ONNX keep its names and its meaning
(https://onnx.ai/onnx/operators), with the forms of every operator set since 7; `tflite` maps those of TFLite to them.
"""

from qjax.contrib.float_models.operators import (
    elementwise,
    images,
    moves,
    norms,
    products,
    recurrent,
    reductions,
    selections,
    signals,
    tflite,
    windows,
)

__all__ = [
    "elementwise",
    "images",
    "moves",
    "norms",
    "products",
    "recurrent",
    "reductions",
    "selections",
    "signals",
    "tflite",
    "windows",
]
