"""The file formats that `graph.emit` writes, by name; other packages add theirs with `register_emitter`.

register_emitter("rtl", "qjax.contrib.rtl")
"""

EMITTERS = {format: f"qjax.export.emit.{format}" for format in ("c", "onnx", "stablehlo", "tflite")}
"""Name of a format -> its module, which has `emit(graph, path, **options)` and is imported on first use."""


def register_emitter(format: str, module: str) -> None:
    """Add a format to `graph.emit`.

    Args:
      format: its name. module: the module that has `emit(graph, path, **options)`, imported on first use.

    Raises:
      ValueError: another module writes that format already.
    """
    if EMITTERS.setdefault(format, module) != module:
        raise ValueError(
            f"register_emitter: {EMITTERS[format]} writes {format!r} already: choose another name for {module}."
        )
