"""Products of matrices: Gemm, MatMul, Einsum, Attention."""

import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.contrib.float_models.graph import Call, operator
from qjax.ops import products


def matmul_of(a: Any, b: Any) -> Any:
    """`jnp.matmul` with every product's precision stated, as few products as broadcasting allows."""
    if a.ndim == 1 or b.ndim == 1:
        left, right = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
        y = matmul_of(left, right)
        return jnp.squeeze(
            y, tuple(({y.ndim - 2} if a.ndim == 1 else set()) | ({y.ndim - 1} if b.ndim == 1 else set()))
        )
    kind = a.dtype
    if b.ndim == 2:
        return products.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), kind)
    if a.ndim == 2 or a.shape[:-2] != b.shape[:-2]:
        outer = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (jnp.broadcast_to(v, (*outer, *v.shape[-2:])) for v in (a, b))
    batch = tuple(range(a.ndim - 2))
    return products.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch)), kind)


@operator("MatMul", weights=(1,))
def _matmul(call: Call, a: Any, b: Any) -> Any:
    return matmul_of(a, b)


@operator("Gemm", weights=(1, 2))
def _gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    axes = ((0 if call.get("transA", 0) else 1,), (1 if call.get("transB", 0) else 0,))
    y = products.dot_general(a, b, (axes, ((), ())), a.dtype)
    if alpha != 1.0:
        y = y * call.like(alpha, y)
    if c is None or beta == 0.0:
        return y
    y, c = call.ranked(y, c)
    return y + (c if beta == 1.0 else c * call.like(beta, y))


@operator("Einsum")
def _einsum(call: Call, *arrays: Any) -> Any:
    equation = call.get("equation").replace(" ", "")
    if any(letter not in string.ascii_letters + ",->." for letter in equation):
        raise call.refuse(f"the equation {equation[:80]!r}", "The file is damaged: export it again")
    return products.einsum(equation, *arrays)


@operator("Det")
def _det(call: Call, x: Any) -> Any:
    return jnp.linalg.det(x)


# ---------------------------------------------------------------------- attention


@operator("Attention")
def _attention(
    call: Call,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    lengths: Any = None,
) -> Any:
    """Scaled dot-product attention with heads that share keys, caches, a mask, and a soft cap.

    https://onnx.ai/onnx/operators/onnx__Attention.html
    """
    flat = q.ndim == 3
    if flat:
        heads, shared = call.get("q_num_heads"), call.get("kv_num_heads")
        q, k, v = (
            jnp.transpose(jnp.reshape(x, (*x.shape[:2], count, -1)), (0, 2, 1, 3))
            for x, count in ((q, heads), (k, shared), (v, shared))
        )
    if past_key is not None:
        k, v = jnp.concatenate([past_key, k], 2), jnp.concatenate([past_value, v], 2)
    present_key, present_value = k, v
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    scale = call.get("scale") or q.shape[-1] ** -0.5
    root = call.like(scale**0.5, q)
    scores = matmul_of(q * root, jnp.swapaxes(k * root, 2, 3))
    raw = scores
    bias, least = None, call.like(-np.inf, q)
    rows, columns = scores.shape[-2:]
    if mask is not None:
        missing = columns - mask.shape[-1]
        if mask.dtype == bool:
            mask = jnp.where(mask, call.like(0, q), least)
        if missing > 0:
            mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=-np.inf)
        bias = call.ranked(scores, mask)[1]
    # Each row may see the keys of its past, and of the windows around its own place.
    offset: Any = past_key.shape[2] if past_key is not None else 0
    if lengths is not None:
        offset = jnp.reshape(lengths, (-1, 1, 1, 1)) - rows
    own = np.arange(rows, dtype=np.int32)[None, None, :, None] + offset
    keys = np.arange(columns, dtype=np.int32)[None, None, None]
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    limits = [keys <= own] if call.get("is_causal", 0) else []
    limits += [keys >= own - left] if left >= 0 else []
    limits += [keys <= own + right] if right >= 0 else []
    for kept in limits:
        outside = jnp.where(kept, call.like(0, q), least)
        bias = outside if bias is None else bias + outside
    if lengths is not None:
        there = np.arange(columns)[None, None, None] < jnp.reshape(lengths, (-1, 1, 1, 1))
        padded = jnp.where(there, call.like(0, q), least)
        bias = padded if bias is None else bias + padded
    cap = call.get("softcap", 0.0)
    mode = call.get("qk_matmul_output_mode", 0)
    capped = jnp.tanh(scores / call.like(cap, q)) * call.like(cap, q) if cap else scores
    biased = capped if bias is None else capped + bias
    weights = jax.nn.softmax(biased, -1)
    if bias is not None:
        # A row without any key has no weights at all.
        weights = jnp.where(jnp.all(jnp.isneginf(biased), -1, keepdims=True), call.like(0, q), weights)
    y = matmul_of(weights, v)
    if flat:
        y = jnp.reshape(jnp.transpose(y, (0, 2, 1, 3)), (y.shape[0], y.shape[2], -1))
    shown = {0: raw, 1: capped, 2: biased, 3: weights}[mode]
    return (y, present_key, present_value, shown)[: max(len(call.node.outputs), 1)]


@operator("RotaryEmbedding")
def _rotary_embedding(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    """Turns pairs of features by angles: (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos)."""
    flat = x.ndim == 3
    heads = call.get("num_heads", 0)
    if flat:
        x = jnp.reshape(x, (*x.shape[:2], heads, -1))
    else:
        x = jnp.transpose(x, (0, 2, 1, 3))
    size = call.get("rotary_embedding_dim", 0) or x.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    if positions is not None:
        cos, sin = (jnp.take(table, positions, axis=0) for table in (cos, sin))
    cos, sin = (jnp.expand_dims(table[..., : size // 2], 2) for table in (cos, sin))
    if call.get("interleaved", 0):
        one, two = turned[..., 0::2], turned[..., 1::2]
    else:
        one, two = jnp.split(turned, 2, axis=-1)
    first, second = one * cos - two * sin, one * sin + two * cos
    if call.get("interleaved", 0):
        joined = jnp.reshape(jnp.stack([first, second], -1), turned.shape)
    else:
        joined = jnp.concatenate([first, second], -1)
    y = jnp.concatenate([joined, kept], -1)
    return jnp.reshape(y, (*y.shape[:2], -1)) if flat else jnp.transpose(y, (0, 2, 1, 3))
