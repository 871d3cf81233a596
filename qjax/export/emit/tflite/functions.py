"""Functions of whole rows: SOFTMAX if the node is the runtime's kernel. Sums of more than 32 bits are rejected.

LiteRT's targets replace norms and masked softmaxes by chains of operators (`Target.composed`), so those nodes are not
written here.
"""

import math

from qjax.export.emit.tflite import tables
from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.graph.ir import Node
from qjax.support.errors import Unsupported

_ELSEWHERE = "emit('onnx') and emit('c') support it, with the same codes"


@lowers("softmax")
def softmax(writer: Writer, node: Node) -> Value:
    """SOFTMAX."""
    if node.attributes["method"] == "exact":
        why = (
            "with a mask" if len(node.inputs) > 1 else "of other codes, axes or grids than the runtime's own kernel has"
        )
        raise Unsupported(
            f"a softmax {why}",
            "TFLite has SOFTMAX of int8 codes over the last axis. Under LiteRT's targets such a softmax takes masks, "
            f"but no `where=`. Else put a recipe's FLOAT there; {_ELSEWHERE}",
        )
    x, (dtype, quantization) = writer.input(node), writer.grid(node)
    rows = writer.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]), frozenset({0} if x.free else ()))
    result = writer.apply("SOFTMAX", [rows], rows.shape, rows.free, dtype, quantization, beta=1.0)
    return writer.reshape(writer.bounded(node, result), x.shape, x.free)


@lowers("log_softmax")
@lowers("logsumexp")
def log_softmax(writer: Writer, node: Node) -> Value:
    """LOG_SOFTMAX of a file that was read; others are rejected: TFLite rounds differently, on a fixed grid."""
    if node.attributes.get("method") == "gemmlowp":
        x, (dtype, quantization) = writer.input(node), writer.grid(node)
        return writer.bounded(node, writer.apply("LOG_SOFTMAX", [x], x.shape, x.free, dtype, quantization))
    raise Unsupported(
        f"a {node.op}",
        f"TFLite has none with the bits of the graph: return the numbers that go into it; {_ELSEWHERE}",
    )


@lowers("divide")
def divide(writer: Writer, node: Node) -> Value:
    """A table of all pairs of codes."""
    return tables.binary(writer, node)


@lowers("normalize")
def normalize(writer: Writer, node: Node) -> Value:
    """Rejects it: variances and roots need more than 32 bits. Norms with a chain of operators do not come here."""
    raise Unsupported(
        "a normalization over the data",
        "It is written for LiteRT only, over whole axes (LayerNorm, RMSNorm), of signed codes: choose a target of "
        f"LiteRT and such a norm, or batch norm; {_ELSEWHERE}",
    )


@lowers("grouped_dot")
def grouped_dot(writer: Writer, node: Node) -> Value:
    """Rejects it: it adds several accumulators of 32 bits, each times its factor, before it rounds."""
    raise Unsupported(
        "a product whose weights have a scale for every group",
        f"TFLite has one scale per channel: use weights=QSpec(axis=-1) without group_size; {_ELSEWHERE}",
    )


@lowers("embed_rows")
def embed_rows(writer: Writer, node: Node) -> Value:
    """Rejects it: the result of the lookup would need a requantization for each of its rows."""
    raise Unsupported(
        "a lookup in a table whose rows have different scales",
        f"TFLite has one scale for what a GATHER returns: leave out the table's override with axis=0; {_ELSEWHERE}",
    )
