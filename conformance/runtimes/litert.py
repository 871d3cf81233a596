"""LiteRT, the runtime that was TensorFlow Lite, with each of its three sets of kernels."""

import dataclasses
import importlib.metadata
from typing import Any, Literal

import numpy as np

from conformance.case import Case
from conformance.runtimes import litert_worker
from conformance.runtimes.tflite_model import tflite_model

Mode = Literal["reference", "optimized", "xnnpack"]

RESOLVERS = {
    "reference": "BUILTIN_REF",
    "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "xnnpack": "AUTO",
}
"""By mode, the name in LiteRT's OpResolverType."""


@dataclasses.dataclass(frozen=True)
class LiteRT:
    """The interpreter of the package ai-edge-litert, on one thread.

    mode: "reference" runs the reference kernels, "optimized" the optimised ones (ruy, gemmlowp, Eigen), "xnnpack",
    the default of the package, gives XNNPACK every operation that it takes and the optimised kernels the others.
    """

    mode: Mode = "xnnpack"

    def __post_init__(self) -> None:
        if self.mode not in RESOLVERS:
            raise ValueError(f"mode must be one of {', '.join(RESOLVERS)}. Got {self.mode!r}.")

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return f"litert-{self.mode}"

    def version(self) -> str:
        """The package and its version."""
        _module()
        return f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        _module()
        return litert_worker.run((RESOLVERS[self.mode], tflite_model(case), case.inputs))


def _module() -> Any:
    try:
        return litert_worker.load()
    except ImportError as error:
        raise ImportError("LiteRT needs the package ai-edge-litert: pip install ai-edge-litert") from error
