"""Profiles of runtimes that demand no rules of files, only an arithmetic: they fill in the overrides of a recipe.

Recipe(profile="llama_cpp_q4_0")    ->    Recipe(overrides={".*": Dynamic(weights=WeightFormat("q4_0"), ...)})
"""

from typing import Any

from qjax.numerics.block_formats import BLOCK
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic


def _llama_cpp(format: str) -> dict[str, Any]:
    return {".*": Dynamic(weights=WeightFormat(format), per="block", block=BLOCK, arithmetic="ggml_avx2")}


OVERRIDES = {f"llama_cpp_{format}": _llama_cpp(format) for format in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")}
"""Name -> the overrides that it puts before those of the user."""
