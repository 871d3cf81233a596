"""The hook for products that are written with the vectors of a processor: `graph.emit("c", ..., simd=...)`.

A module that `support.extensions.register_vectors` names has `FORMS`: a value of `simd` -> `Vectors`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping

from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.windows import Window
from qjax.export.emit.requantizations import Finish
from qjax.support.extensions import VECTORS

Write = Callable[[Layer], None]
"""Writes a nest of loops into a layer."""
Epilogue = Callable[[Register], Value]
"""From sums to codes."""


@dataclasses.dataclass(frozen=True)
class Vectors:
    """What one value of `simd` writes in another form than plain loops; all forms compute the same codes.

    helpers: name -> the text of a helper in C, and the names of those that it calls.
    window: (result, product of codes with weights, epilogue, the epilogue's short form) -> its writer, or None.
    product: (attributes, constants, inputs, result) -> the writer of a product of two activations, or None.
    wide: whether a vector holds many codes, which is what pays off for products of bits with several planes.
    threads: whether the processors can share a loop among threads.
    """

    helpers: Mapping[str, tuple[str, tuple[str, ...]]]
    window: Callable[[Buffer, Window, Epilogue, Finish | None], Write | None]
    product: Callable[..., Write | None]
    wide: bool
    threads: bool


def vectors_of(source: Source) -> Vectors | None:
    """The forms that a file's `simd` asks for; None without any."""
    return None if source.simd is False else importlib.import_module(VECTORS[source.simd]).FORMS[source.simd]
