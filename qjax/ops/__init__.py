"""The operations of qjax. To add one: write its file and import it here."""

# importing an op's file registers it
# pyright: reportUnusedImport=false

from qjax.ops import (
    add,
    affine_step,
    batch_norm,
    broadcast,
    cast,
    clamp,
    concatenate,
    conv,
    dot,
    dropout,
    embed,
    max_pool,
    multiply,
    pad,
    rescale,
    reshape,
    reverse,
    slice,
    sums,
    transpose,
)
from qjax.ops.base import Array, Deferred, Op, Quantized, Role, get, names, read, real
from qjax.ops.pending import Pending

__all__ = ["Array", "Deferred", "Op", "Pending", "Quantized", "Role", "get", "names", "read", "real"]
