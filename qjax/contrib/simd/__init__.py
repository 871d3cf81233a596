"""Emitted C with the vectors of a processor: `simd=True` for x86-64 and AArch64, `simd="cortex_m"` for a Cortex-M.

Without either, products of few codes and weights are written bit by bit. The codes are those of plain loops. In
reading order:

- `tiles`: nests of loops over a few positions that share every weight.
- `one_bit`: products of codes and weights of two or three values.
- `vectors.h`, `vector_codes`: sums of sixteen features, and the codes that they become.
- `vector_windows`, `vector_channels`, `vector_products`: dense layers and convolutions, depthwise ones, and products
  of two activations.
- `cortex_m*.h`, `cortex_windows`: the same for Helium and the DSP extension.
"""

from collections.abc import Callable
from importlib import resources
from typing import Any

from qjax.contrib.simd import cortex_windows, one_bit, vector_products, vector_windows
from qjax.export.emit.c.values import Buffer
from qjax.export.emit.c.vectors import Epilogue, Vectors, Write
from qjax.export.emit.c.windows import Window
from qjax.export.emit.requantizations import Finish

__all__ = ["FORMS"]


def _own(name: str) -> str:
    """The text of a C file in this folder."""
    return resources.files("qjax.contrib.simd").joinpath(f"{name}.h").read_text("ascii").rstrip()


def _cortex_m() -> str:
    forms = [
        "#if defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)",
        _own("cortex_m_mve"),
        "#elif defined(__ARM_FEATURE_DSP) && defined(__ARM_FEATURE_SIMD32) && !defined(__ARM_BIG_ENDIAN)",
        _own("cortex_m_dsp"),
        "#else",
        _own("cortex_m_plain"),
        "#endif",
    ]
    parts = ["#include <string.h>", _own("cortex_m"), "\n".join(forms), _own("cortex_m_codes")]
    return "\n\n".join(parts)


def _window(
    module: Any, *, wide: bool
) -> Callable[[Buffer, Window, Epilogue, Finish | None, tuple[int, ...] | None], Write | None]:
    """`Vectors.window`: bit by bit where that pays off, else by a module that has `fits` and `store`."""

    def writer(
        target: Buffer, window: Window, epilogue: Epilogue, finish: Finish | None, codes: tuple[int, ...] | None
    ) -> Write | None:
        if codes is not None and one_bit.fits(window, codes, wide=wide):
            return lambda layer: one_bit.store(layer, target, window, epilogue, codes)
        if module is None or not module.fits(window):
            return None
        return lambda layer: module.store(layer, target, window, epilogue, finish)

    return writer


def _product(attributes: Any, constants: Any, inputs: Any, target: Buffer) -> Write | None:
    product = vector_products.read(attributes, constants, inputs, target)
    return None if product is None else lambda layer: vector_products.store(layer, target, product)


def _nothing(*given: Any) -> None:
    return None


_ONE_BIT = (f"#include <string.h>\n\n{_own('one_bit')}", ("unused",))
_VECTORS = (f"#include <string.h>\n\n{_own('vectors')}", ("unused",))

FORMS = {
    False: Vectors({"one_bit": _ONE_BIT}, _window(None, wide=False), _nothing),
    True: Vectors({"vectors": _VECTORS, "one_bit": _ONE_BIT}, _window(vector_windows, wide=True), _product),
    "cortex_m": Vectors(
        {"one_bit": _ONE_BIT, "cortex_m": (_cortex_m(), ("unused",))},
        _window(cortex_windows, wide=False),
        _nothing,
        threads=False,
    ),
}
"""A value of `simd` -> the forms of products."""
