"""What the pages say that qjax cannot do: each sentence is still there, and still true.

When a check here fails because something works by now, correct the page and take the row away.
"""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import qjax
from qjax.export.emit.c import to_files

ROOT = pathlib.Path(__file__).parent.parent
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
FLOAT = {".*": qjax.FLOAT}


def graph(function: Callable[..., Any], *more: Any, **recipe: Any) -> Any:
    args = (X, *more) if more else X
    return qjax.convert(qjax.quantize(qjax.from_function(function, W), qjax.Recipe(**recipe), args), args)


def scattered(places: int) -> Callable[..., Any]:
    """A sum for each example, at as many places as the data choose."""

    def function(w: Any, x: Any, i: Any) -> Any:
        rows = jnp.tile(x @ w, (1, places // 4))
        return jax.vmap(lambda row, i: jax.ops.segment_sum(row, i, 3))(rows, i)

    return function


def scatter(places: int) -> Any:
    return graph(scattered(places), np.zeros((4, places), np.int32))


def normalized(w: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def while_positive(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda y: jnp.any(y > 0), lambda y: y - 1, x @ w)


REFUSED: list[tuple[str, str, Callable[[Any], Any], str]] = [
    (
        "README.md",
        "Loops whose length depends on data, and orders (`argsort`), cannot be converted to integers.",
        lambda path: graph(while_positive),
        "'while' .* has no integer form",
    ),
    (
        "README.md",
        "Loops whose length depends on data, and orders (`argsort`), cannot be converted to integers.",
        lambda path: graph(lambda w, x: jnp.argsort(x @ w).astype(jnp.float32)),
        "'sort' .* has no integer form",
    ),
    (
        "README.md",
        "Sums at places that data choose (`segment_sum`) convert for at most 32 places per example.",
        lambda path: scatter(36),
        "'scatter-add' .* has no integer form",
    ),
    *(
        (
            "README.md",
            "`FLOAT` parts with functions or sums of floats can be exported only to StableHLO.",
            lambda path, kind=kind, options=options: graph(
                lambda w, x: jnp.exp(x @ w), overrides=FLOAT, **options
            ).emit(kind, path),
            "float",
        )
        for kind, options in (("c", {}), ("onnx", {}), ("tflite", {"target": "tflite_micro"}))
    ),
    (
        "docs/tflite.md",
        "| functions and sums of floats |",
        lambda path: graph(lambda w, x: jnp.exp(x @ w), overrides=FLOAT, target="tflite_micro").emit("tflite", path),
        "have no form in a .tflite file",
    ),
    (
        "docs/tflite.md",
        "So it has no norms and no masked softmax.",
        lambda path: graph(normalized, target="tflite_micro").emit("tflite", path),
        "have no form in a .tflite file",
    ),
    (
        "docs/coming-from.md",
        "qjax has no GPU kernels of its own and no float8 activations.",
        lambda path: qjax.Recipe(activations=qjax.WeightFormat("fp8_e4m3")),  # pyright: ignore[reportArgumentType]
        "expected a QSpec",
    ),
    (
        "docs/coming-from.md",
        '| `OdmlQatProvider` and LiteRT\'s converter | `graph.emit("tflite", ...)`; no converter |',
        lambda path: graph(lambda w, x: x @ w).emit("litert_converter", path),
        "expected one of the formats",
    ),
]


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it:UserWarning")
@pytest.mark.parametrize(("page", "sentence", "check", "message"), REFUSED)
def test_what_a_page_denies_is_refused(page, sentence, check, message, tmp_path):
    assert sentence in (ROOT / page).read_text()
    with pytest.raises((ValueError, TypeError), match=message):
        check(tmp_path / "file")


def test_sums_at_32_places_convert():
    """The number that README.md states is the greatest."""
    assert "scatter" not in {node.op for node in scatter(32).ir.nodes}


def test_c_has_intrinsics_only_with_simd():
    assert "Emitted C has intrinsics only with `simd=`." in (ROOT / "README.md").read_text()
    ir = graph(lambda w, x: x @ w).ir
    intrinsic = re.compile(r"_mm\d*_|immintrin|arm_neon|vdotq_")
    assert intrinsic.search(to_files(ir)["model.c"]) is None
    assert intrinsic.search(to_files(ir, simd=True)["model.c"]) is not None


def test_c_needs_no_library_no_allocation_no_float():
    sentence = "no library beyond `<stdint.h>`, no allocation, no float, no global state."
    assert sentence in (ROOT / "docs/c.md").read_text()
    text = to_files(graph(lambda w, x: jax.nn.softmax(x @ w)).ir)["model.c"]
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert set(re.findall(r"#include (\S+)", code)) <= {'"model.h"', "<stdint.h>"}
    assert re.search(r"\b(malloc|calloc|free|float|double)\b", code) is None
    assert not re.findall(r"^static (?!const|inline|void)\w+ \w+(?:\[\d+\])?(?: =|;)", code, re.MULTILINE)
