"""The operations of qjax. To add one: write its file and import it here."""

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
from qjax.ops.base import Array, Op, Quantized, Role, get, names, read, real

__all__ = ["Array", "Op", "Quantized", "Role", "get", "names", "read", "real"]
