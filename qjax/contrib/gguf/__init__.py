"""GGUF files, in which llama.cpp's users publish language models: their codes enter a model unchanged, and leave it.

    file = qjax.gguf.read("SmolLM2-135M-Instruct.Q4_1.gguf")
    qjax.gguf.load(model, file, names)                                  # the floats that the file's codes represent
    recipe = qjax.Recipe(overrides=qjax.gguf.overrides(file, names, activations="block"))
    qmodel = qjax.quantize(model, recipe, tokens)
    qjax.gguf.freeze(qmodel, tokens, file, names)                       # the file's own codes, packed
    qjax.gguf.write(qmodel, "trained.gguf", names, like=file)           # the trained codes, everything else as it was

- `blocks`: bytes of a block format to codes, scales and minimums, and back.
- `file`: what a file holds.
- `model`: `load`, `overrides`, `freeze` and `write`, which connect parameters with tensors by `names`.

The container is read by the package gguf, which llama.cpp's authors publish: `pip install "qjax-quant[gguf]"`.
"""

from qjax.contrib.gguf.file import GGUFFile, Tensor, read
from qjax.contrib.gguf.model import Loaded, Source, freeze, load, overrides, write

__all__ = ["GGUFFile", "Loaded", "Source", "Tensor", "freeze", "load", "overrides", "read", "write"]
