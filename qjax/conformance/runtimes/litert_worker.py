"""The process that holds LiteRT for another machine: pickled requests on stdin, pickled answers on stdout.

A script of its own that imports numpy and ai_edge_litert only, so that an emulated Python needs nothing else.
`litert_arm` writes the requests: (name of the resolver, bytes of the model, inputs).
"""

import importlib
import importlib.metadata
import os
import pickle
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np


def run(module: Any, resolver: str, model: bytes, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The output of a model of one output."""
    kinds = module.OpResolverType
    interpreter = module.Interpreter(
        model_content=model, experimental_op_resolver_type=getattr(kinds, resolver), num_threads=1
    )
    interpreter.allocate_tensors()
    for details, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(details["index"], np.ascontiguousarray(x))
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def main() -> None:
    """Answer until stdin ends: (machine, package, emulator) first, then ("codes", array) or ("error", message)."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # whatever else writes to stdout must not come between the answers
    os.dup2(2, 1)
    module = importlib.import_module("ai_edge_litert.interpreter")
    version = importlib.metadata.version("ai-edge-litert")
    _write(answers, (platform.machine(), f"ai-edge-litert {version}", os.environ.get("QJAX_EMULATOR", "")))
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: tuple[Any, ...] = ("codes", run(module, *request))
        except Exception:
            answer = ("error", traceback.format_exc())
        _write(answers, answer)


def _write(stream: Any, answer: tuple[Any, ...]) -> None:
    pickle.dump(answer, stream)
    stream.flush()


if __name__ == "__main__":
    main()
