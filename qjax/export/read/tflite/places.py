"""Places along an axis: int32 in a graph, also where the file has int64, as for ONNX."""

import dataclasses

from qjax.export.read.tflite.model import Model


def with_int32_places(model: Model) -> Model:
    """The model whose ARG_MAX and ARG_MIN make int32, which holds every place along an axis."""
    wide = {
        index
        for operator in model.operators
        if operator.name in ("ARG_MAX", "ARG_MIN")
        for index in operator.outputs
        if model.tensors[index].dtype == "int64"
    }
    if not wide:
        return model
    tensors = (dataclasses.replace(t, dtype="int32") if t.index in wide else t for t in model.tensors)
    return dataclasses.replace(model, tensors=tuple(tensors))
