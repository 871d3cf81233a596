"""The operations of qjax. To add one: write its file and import it here."""

# importing an op's file registers it
# pyright: reportUnusedImport=false

from qjax.ops import (
    add,
    affine_step,
    backend,
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
from qjax.ops.backend import Fused, Member
from qjax.ops.base import Array, Deferred, Op, Quantized, Role, get, names, read, real
from qjax.ops.pending import Pending

__all__ = ["Array", "Deferred", "Fused", "Member", "Op", "Pending", "Quantized", "Role", "get", "names", "read", "real"]
