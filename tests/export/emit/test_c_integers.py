"""Random programs of integers as C: narrow types, ranges and wraps, under gcc with and without sanitizers."""

import ctypes
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.helpers import helper_texts
from qjax.export.emit.c.jaxprs import trace
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.text import TYPES
from qjax.export.emit.c.values import Buffer
from tests.export.emit.c_build import FASTEST
from tests.export.emit.random_integers import random_program

SHAPE = (5, 9)
SEEDS = {"few": range(10), "more": range(10, 60)}


def text_of(sources: Source, functions: list[str]) -> str:
    return "\n\n".join(
        ["#include <stdint.h>", *helper_texts(sources.helpers, {}), *sources.texts, *sources.table_texts, *functions]
    )


def compiled(text: str, folder: Path, flags: list[str]) -> ctypes.CDLL:
    path = folder / "test.c"
    path.write_text(text)
    library = folder / f"{len(flags)}.so"
    subprocess.run(["gcc", "-std=c99", *flags, "-shared", "-fPIC", "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("flags", [["-O0", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"], FASTEST])
@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.sampled(1)
def test_random_programs(flags, seeds, tmp_path):
    source, functions, wanted = Source(), list[str](), dict[str, np.ndarray]()
    feeds = [np.random.default_rng(0).integers(-128, 128, SHAPE).astype(np.int8) for _ in range(2)]
    for seed in seeds:
        for index in range(6):
            name = f"f{seed}_{index}"

            def one(x: jax.Array, y: jax.Array, seed: int = seed, index: int = index) -> jax.Array:
                return random_program(seed, sums=False)(x, y)[index]

            value = trace(one, {"x": Buffer(SHAPE, "int8", "in0"), "y": Buffer(SHAPE, "int8", "in1")})
            layer = Layer(source, name, f"{name}_step", "", ["in0", "in1", "out"])
            layer.store(Buffer(value.shape, value.dtype, "out"), value)
            assert not layer.scratch
            head = f"void {name}(const int8_t *in0, const int8_t *in1, {TYPES[value.dtype]} *out)"
            functions.append("\n".join([f"{head};", head, "{", *layer.root.lines, "}"]))
            wanted[name] = np.asarray(jax.jit(one)(*feeds))
    library = compiled(text_of(source, functions), tmp_path, flags)
    for name, want in wanted.items():
        found = np.zeros_like(want)
        getattr(library, name)(*(ctypes.c_void_p(array.ctypes.data) for array in (*feeds, found)))
        assert np.array_equal(found, want), name
