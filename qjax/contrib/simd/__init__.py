"""Emitted C with the vectors of a processor: `simd=True` for x86-64 and AArch64, `simd="cortex_m"` for a Cortex-M.

The codes are those of plain loops. In reading order:

- `vectors.h`, `vector_codes`: sums of sixteen features, and the codes that they become.
- `vector_windows`, `vector_channels`, `vector_products`: dense layers and convolutions, depthwise ones, and products
  of two activations.
- `cortex_m*.h`, `cortex_windows`: the same for Helium and the DSP extension.
"""

from collections.abc import Callable
from importlib import resources
from typing import Any

from qjax.contrib.simd import cortex_windows, vector_products, vector_windows
from qjax.export.emit.c.helpers import ONE_BIT
from qjax.export.emit.c.loops import Layer
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


def _window(module: Any) -> Callable[[Buffer, Window, Epilogue, Finish | None], Write | None]:
    """`Vectors.window` for a module that has `fits` and `store`."""

    def writer(target: Buffer, window: Window, epilogue: Epilogue, finish: Finish | None) -> Write | None:
        def write(layer: Layer) -> None:
            module.store(layer, target, window, epilogue, finish)

        return write if module.fits(window) else None

    return writer


def _product(attributes: Any, constants: Any, inputs: Any, target: Buffer) -> Write | None:
    product = vector_products.read(attributes, constants, inputs, target)
    return None if product is None else lambda layer: vector_products.store(layer, target, product)


FORMS = {
    True: Vectors(
        {"vectors": (f"#include <string.h>\n\n{_own('vectors')}", ("unused",)), "one_bit": ONE_BIT},
        _window(vector_windows),
        _product,
        wide=True,
        threads=True,
    ),
    "cortex_m": Vectors(
        {"cortex_m": (_cortex_m(), ("unused",))},
        _window(cortex_windows),
        lambda *given: None,
        wide=False,
        threads=False,
    ),
}
"""A value of `simd` -> the forms of products."""
