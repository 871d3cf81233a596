"""Artifacts made by hand, with a valid checksum around any content."""

import base64
import hashlib
import json

from qjax.export.artifact import VERSION, ArtifactError, GraphError, from_bytes, to_bytes
from qjax.export.document import deflated, unpacked_text
from tests.export.graphs import constant, differences, graph_of, quantization, rich_graph

REFUSED = (ArtifactError, GraphError)
START = '{"__metadata__":{"format":"qjax","sha256":"'


def seal(rest: str, data: bytes, *, version: str = str(VERSION), length: int | None = None) -> bytes:
    """An artifact with a valid checksum around any header text after the fixed fields, and any data."""
    tail = f'","version":"{version}","graph":{rest}'.encode("utf-8", "surrogatepass")
    head = START.encode() + b"0" * 64 + b'","bytes":"' + b"%019d" + tail
    size = 8 + len(head) - len(b"%019d") + 19 + len(data)
    head = head.replace(b"%019d", b"%019d" % size, 1)
    file = (len(head) if length is None else length).to_bytes(8, "little") + head + data
    return file.replace(b"0" * 64, hashlib.sha256(file).hexdigest().encode(), 1)


def structure_of(file: bytes) -> str:
    """The graph's JSON in an artifact."""
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return unpacked_text(header["__metadata__"]["graph"])


def parts(file: bytes) -> tuple[dict, dict, bytes]:
    """The document, the entries of the arrays and the data of an artifact."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    del header["__metadata__"]
    return json.loads(structure_of(file)), header, file[end:]


def packed(text: str) -> str:
    return base64.b64encode(deflated(text.encode("utf-8", "surrogatepass"))).decode()


def build(document, arrays, data: bytes) -> bytes:
    rest = json.dumps(packed(json.dumps(document))) + "}," + json.dumps(arrays)[1:]
    return seal(rest, data)


def with_document_text(text: str) -> bytes:
    return seal(json.dumps(packed(text)) + "}}", b"")


def survives(file: bytes) -> bool:
    """Whether a file loads; if so, to a graph that saves and loads again. Raises on any other exception."""
    try:
        graph = from_bytes(file)
    except REFUSED:
        return False
    assert differences(graph, from_bytes(to_bytes(graph))) == []
    return True


FILE = to_bytes(rich_graph())
SMALL = to_bytes(
    graph_of(
        constant("w", [[1, -2, 3]], "int8", quantization(-8, 7, scale=[0.5, 0.25, 2], axes=(1,))),
        constant("m", [5, 6], "int32"),
    )
)
