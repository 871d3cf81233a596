"""A public model as it is, with one batch: what each of the collections in this package returns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax


@dataclasses.dataclass(frozen=True)
class Public:
    """A Linen module with its variables (a module of nnx stands alone), and the arguments of one call.

    evaluation: keyword arguments of the call. method: what is called in the place of `__call__`. rngs: a key for each
    stream that the evaluation asks for. batch: "fixed" for a model that mixes the examples of a batch.
    """

    module: Any
    variables: Any
    sample: tuple[Any, ...]
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: Any = None
    rngs: Any = None
    batch: Any = None

    def model(self) -> nnx.Module:
        """What `qjax.quantize` takes, in evaluation mode."""
        if isinstance(self.module, nnx.Module):
            model = self.module
        else:
            model = qjax.from_linen(
                self.module, self.variables, evaluation=self.evaluation, method=self.method, rngs=self.rngs
            )
        model.eval()
        return model


Source = dict[str, Callable[[], Public]]
"""The models of one collection by name; each is built when it is asked for."""


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers of a normal distribution."""
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int, start: int = 0, seed: int = 0) -> jax.Array:
    """Random integers."""
    return jax.random.randint(jax.random.key(seed), shape, start, below, jnp.int32)


def filled(variables: Any) -> Any:
    """Variables whose matrices of zeros are random: such a matrix would hide everything before it."""
    leaves, tree = jax.tree.flatten(variables)
    return jax.tree.unflatten(
        tree,
        [
            x if x.ndim < 2 or bool(jnp.any(x)) else normal(*x.shape, seed=i) / x.shape[0] ** 0.5
            for i, x in enumerate(leaves)
        ],
    )


def positions(n: int, length: int) -> jax.Array:
    """The position of every token."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (n, length))


def padding(n: int, length: int) -> jax.Array:
    """A mask whose examples have different lengths: 1 for a token, 0 for padding behind it."""
    return jnp.asarray(np.arange(length) < length - np.arange(n)[:, None] % (length // 2), jnp.int32)


def examples(sample: tuple[Any, ...]) -> int:
    """How many examples a batch has; the place in a cache is a number and has none."""
    return next(x.shape[0] for x in jax.tree.leaves(sample) if x.ndim)


def random_batch(sample: tuple[Any, ...], n: int, seed: int) -> tuple[Any, ...]:
    """Arguments like the sample's for `n` examples: floats drawn from its own, integers the rows of its examples.

    A number that belongs to no example, such as the place in a cache, stays.
    """
    key = jax.random.key(seed)
    rows = jax.random.choice(key, examples(sample), (n,))

    def like(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.choice(key, x.ravel(), (n, *x.shape[1:]))
        return x[rows]

    return jax.tree.map(like, sample)
