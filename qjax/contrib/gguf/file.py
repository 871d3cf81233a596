"""What a GGUF file holds: metadata and tensors by name."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.contrib.gguf.blocks import Parts, unpack
from qjax.export.read_errors import reading
from qjax.numerics.block_formats import BLOCK_FORMATS
from qjax.support.names import did_you_mean

_FLOATS = ("f32", "f16", "bf16")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file.

    Args:
      name: such as "blk.0.attn_q.weight".
      shape: in numpy's order: the axis along which blocks run is the last one. A matrix is (outputs, inputs).
      format: ggml's name of its type in small letters, such as "q4_1", "q6_k" or "f32".
      data: the file's bytes of each row, uint8; or the array of an unquantized tensor.
      offset: where its data begin in the file, in bytes.

    Examples:
      ```python
      codes, scales = file["token_embd.weight"].parts()  # of a q8_0 tensor
      ```
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    offset: int

    @property
    def has_codes(self) -> bool:
        """Whether it has one of the formats of `qjax.WeightFormat`."""
        return self.format in BLOCK_FORMATS

    def parts(self) -> Parts:
        """int8 codes of the tensor's shape, and for each block of 32 a float32 scale and, if any, a minimum.

        K formats have scales and minimums in two parts: for 256 weights a float32 number, and for each block an int8
        one, by which it is multiplied; minimums are subtracted.

        Raises:
          ValueError: another format than those of `qjax.WeightFormat`.
        """
        if not self.has_codes:
            raise ValueError(
                f"{self.name}: expected one of the formats {', '.join(BLOCK_FORMATS)}, got {self.format!r}. Its floats "
                "are there: dequantize()."
            )
        codes, *rest = unpack(self.data.reshape(-1, self.data.shape[-1]), self.format)
        lead = self.shape[:-1]
        return codes.reshape(self.shape), *(part.reshape(*lead, -1) for part in rest)

    def dequantize(self) -> np.ndarray:
        """The float32 numbers that the tensor represents, as the package gguf computes them.

        Raises:
          ValueError: a format that the package gguf does not know.
        """
        if self.format in _FLOATS and self.data.dtype != np.uint8:
            return np.asarray(self.data, np.float32).reshape(self.shape)
        try:
            found = _gguf("quants").dequantize(self.data, _gguf("constants").GGMLQuantizationType[self.format.upper()])
        except NotImplementedError as error:
            raise ValueError(
                f"{self.name}: the package gguf cannot dequantize {self.format!r}. Convert the file with llama.cpp's "
                "llama-quantize."
            ) from error
        return np.asarray(found, np.float32).reshape(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file that was read.

    Args:
      path: where it lies.
      metadata: its keys, such as "llama.block_count", and their values.
      tensors: name -> `Tensor`. Their data stay in the file until they are read.

    Examples:
      ```python
      print(file.metadata["llama.block_count"], file["output_norm.weight"].shape)
      ```
    """

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name.

        Raises:
          KeyError: the file has no such tensor.
        """
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {name!r}.{did_you_mean(name, self.tensors)}")
        return self.tensors[name]

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.format] = counts.get(tensor.format, 0) + 1
        kinds = ", ".join(f"{count} {format}" for format, count in sorted(counts.items()))
        return f"{self.metadata.get('general.architecture', 'unknown architecture')}: {kinds}"


def read(path: str | os.PathLike[str]) -> GGUFFile:
    """Read a GGUF file.

    Args:
      path: of the file. It must stay where it is while the result is used, because tensors are read from it on demand.

    Raises:
      FileNotFoundError: no such file. ReadError: a file that is damaged or no GGUF file. ModuleNotFoundError: the
        package gguf is not installed.

    Examples:
      ```python
      file = qjax.gguf.read("SmolLM2-135M-Instruct.Q4_1.gguf")
      print(file)  # llama: 61 f32, 210 q4_1, 1 q8_0
      file["blk.0.attn_q.weight"].parts()  # codes, scales, minimums
      ```
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: expected a GGUF file, but there is none.")
    reader = _gguf("gguf_reader").GGUFReader
    with reading(path):
        found = reader(path)
        metadata = {key: field.contents() for key, field in found.fields.items() if not key.startswith("GGUF.")}
        tensors = {}
        for tensor in found.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            tensors[tensor.name] = Tensor(
                tensor.name, shape, tensor.tensor_type.name.lower(), tensor.data, int(tensor.data_offset)
            )
    return GGUFFile(path, metadata, tensors)


@functools.cache
def _gguf(module: str) -> Any:
    try:
        return importlib.import_module(f"gguf.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'qjax.gguf: GGUF files are read by the package gguf: pip install "qjax-quant[gguf]"', name="gguf"
        ) from error
