"""The hook for products in other forms than plain loops, such as the vectors of a processor: `emit("c", simd=...)`.

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

FEW = 3
"""The codes of an input are counted up to here, because products of so few may be written bit by bit."""
Write = Callable[[Layer], None]
"""Writes a nest of loops into a layer."""
Epilogue = Callable[[Register], Value]
"""From sums to codes."""


@dataclasses.dataclass(frozen=True)
class Vectors:
    """What one value of `simd` writes in another form than plain loops; all forms compute the same codes.

    helpers: name -> the text of a helper in C, and the names of those that it calls.
    window: (result, product of codes with weights, epilogue, the epilogue's short form, the codes that the input can
      contain if they are at most `FEW`) -> its writer, or None.
    product: (attributes, constants, inputs, result) -> the writer of a product of two activations, or None.
    threads: whether the processors can share a loop among threads.
    """

    helpers: Mapping[str, tuple[str, tuple[str, ...]]]
    window: Callable[[Buffer, Window, Epilogue, Finish | None, tuple[int, ...] | None], Write | None]
    product: Callable[..., Write | None]
    threads: bool = True


def vectors_of(source: Source) -> Vectors | None:
    """The forms that are registered for a file's `simd`; None without any."""
    module = VECTORS.get(source.simd)
    return None if module is None else importlib.import_module(module).FORMS[source.simd]
