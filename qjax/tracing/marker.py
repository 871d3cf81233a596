"""A primitive that represents a whole layer as one equation of the jaxpr.

    y = nn.Dropout(0.1)(x)    is traced as    y = layer[op="dropout", attributes=...] x mask

Batch normalisation, dropout and embedding lookups consist of many primitives, which differ between training and
evaluation. A layer that is bound here remains one equation with its name and static attributes. It computes,
differentiates and batches like the function that it wraps, so it works under every transformation.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qjax.numerics.meshes import shape_of


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static part of a marked layer: hashable, so that it can be a parameter of the primitive.

    op: the operation's name. operands: names of the inputs in order. attributes: sorted pairs. function: the float
    computation, arrays -> list of arrays; compared by identity.
    """

    op: str
    operands: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]
    function: Callable[..., list[Any]]


_layer_p = Primitive("qjax_layer")
_layer_p.multiple_results = True


def bind(layer: Layer, *args: jax.Array) -> list[jax.Array]:
    """Apply a marked layer."""
    return _layer_p.bind(*args, layer=layer)


@_layer_p.def_impl
def _impl(*args: Any, layer: Layer) -> list[Any]:
    return layer.function(*args)


@_layer_p.def_abstract_eval
def _abstract(*args: Any, layer: Layer) -> list[Any]:
    return list(jax.make_jaxpr(layer.function)(*map(shape_of, args)).out_avals)


mlir.register_lowering(_layer_p, mlir.lower_fun(lambda *args, layer: layer.function(*args), multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, layer: Layer) -> Any:
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *a: tuple(layer.function(*a)), tuple(primals), tuple(dense))


ad.primitive_jvps[_layer_p] = _jvp


def _batch(args: Any, dims: Any, *, layer: Layer) -> Any:
    axes = list(dims)
    out = jax.vmap(layer.function, in_axes=axes, out_axes=0)(*args)
    return list(out), [0] * len(out)


batching.primitive_batchers[_layer_p] = _batch
