"""The nodes and tensors of a graph in the metadata of a file that has no node for each of them, compressed."""

import base64
import json
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from qjax.export.artifact import fields
from qjax.export.emit.onnx import tensors
from qjax.graph.ir import Graph

LARGEST = 2**28
"""Bytes of a document; a file that claims more is refused."""


def packed(graph: Graph, held: Collection[str]) -> str:
    """The nodes and tensors of a graph as compressed text. held: the file's initializers, which hold most constants."""
    same = {_key(graph.tensors[name].value): name for name in sorted(held) if name in graph.tensors}
    listed: list[dict[str, Any]] = []
    for name, tensor in graph.tensors.items():
        entry = tensors.described(tensor, range(len(tensor.shape)))
        if tensor.value is not None:
            holder = name if name in held else same.get(_key(tensor.value))
            entry |= {"value": np.asarray(tensor.value).tolist()} if holder is None else {"constant": holder}
        listed.append(entry)
    document = {"tensors": listed, "nodes": [fields.of_node(node) for node in graph.nodes]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _key(value: Any) -> Any:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()


def unpacked(text: str) -> Mapping[str, Any]:
    """The inverse, as JSON. Raises a ValueError for what is too large or no such text."""
    reader = zlib.decompressobj()
    found = reader.decompress(base64.b64decode(text, validate=True), LARGEST)
    if reader.unconsumed_tail or not reader.eof:
        raise ValueError(f"the document is damaged or larger than {LARGEST} bytes")
    return json.loads(found)
