"""Runs the file that `jax.export` wrote on XLA."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from qjax.runtimes import Run


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Load the file, which is lowered for the platform of this process."""
    path = os.path.join(folder, "model.stablehlo")
    graph.emit("stablehlo", path, batch=batch, platforms=(jax.default_backend(),), **options)
    with open(path, "rb") as file:
        call = jax.jit(export.deserialize(bytearray(file.read())).call)

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = call(*arrays)
        return [np.asarray(value) for value in (found if isinstance(found, tuple | list) else [found])]

    return run
