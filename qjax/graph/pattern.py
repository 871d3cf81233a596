"""Patterns: descriptions of subgraphs as Python values.

    x, residual = tensor("x"), tensor("residual")
    conv = op("conv", x, name="conv", where=lambda node: node.attributes["groups"] == 1)
    op("add", conv, residual, name="add", relu=True)

A pattern describes the tensor that a node computes, and in turn the tensors that this node reads. `tensor` matches
anything from outside. A *named* pattern matches the same node (or tensor) wherever the name occurs; patterns without a
name are matched separately. A node has only one role in a match; two tensors may be the same.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qjax import ops
from qjax.graph.ir import Tensor
from qjax.graph.node_view import NodeView


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern; use `op`, `tensor`, `constant`, `any_of` and `optional` to make one.

    Args:
      kind: "op", "tensor", "constant" or "any_of".
      ops: names of operations, () for any.
      inputs: patterns, None for any inputs.
      name, where, relu, attributes, commutative: the arguments of `op` and `tensor`.

    Examples:
      ```python
      from qjax.export import match, op, tensor

      layer = op("dot", tensor("x"), name="layer")
      print(match(graph, op("dot", layer, name="next")))  # two dense layers in a row
      ```
    """

    kind: str
    ops: tuple[str, ...] = ()
    inputs: tuple["Pattern", ...] | None = None
    name: str | None = None
    where: Callable[[Any], Any] | None = None
    relu: bool | None = None
    attributes: tuple[tuple[str, Any], ...] = ()
    commutative: bool | None = None

    @staticmethod
    def op(*args: Any, **kwargs: Any) -> "Pattern":
        """See `qjax.graph.pattern.op`."""
        return op(*args, **kwargs)

    def walk(self) -> Iterator["Pattern"]:
        """The pattern and all patterns within it."""
        yield self
        for pattern in self.inputs or ():
            yield from pattern.walk()

    def roots(self) -> Iterator["Pattern"]:
        """The patterns that may match the output: the alternatives of `any_of`, or otherwise itself."""
        if self.kind == "any_of":
            for pattern in self.inputs or ():
                yield from pattern.roots()
        else:
            yield self


def op(
    kinds: str | tuple[str, ...],
    *inputs: Pattern,
    name: str | None = None,
    where: Callable[[NodeView], Any] | None = None,
    relu: bool | None = None,
    attributes: Mapping[str, Any] | None = None,
    commutative: bool | None = None,
) -> Pattern:
    """A pattern for a node.

    Args:
      kinds: the operation's name (`qjax.ops.names()`), or several, or "*" for any.
      inputs: a pattern per input; without any, all inputs match and come from outside.
      name: its label in the match, also in the kernel's view.
      where: a predicate of a `NodeView`. It may use structure: attributes, dtypes, shapes, which constants there are.
        Values of constants and scales are not known inside jit, where `qjax.exact` matches too.
      relu: whether the node's codes end in a fused ReLU; None accepts both. See `NodeView.relu`.
      attributes: values that the node's attributes must have.
      commutative: whether the two inputs may be swapped; None: in additions and multiplications.

    Examples:
      ```python
      from qjax.export import op, tensor

      image = tensor("image")
      residual = op("add", op("conv", image, relu=False), image, relu=True)
      ```
    """
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    unknown = set(names) - {*ops.names(), "*"}
    if unknown:
        raise ValueError(
            f"op: expected names of operations ({', '.join(ops.names())}) or '*', got {', '.join(sorted(unknown))}. A "
            "relu is a bound on its producer: op('conv', relu=True)."
        )
    for pattern in inputs:
        _require(pattern, "op: an input")
    _check_name(name)
    fixed = tuple(sorted((attributes or {}).items()))
    chosen = () if "*" in names else names
    return _check_names(Pattern("op", chosen, tuple(inputs) or None, name, where, relu, fixed, commutative))


def tensor(name: str | None = None, *, where: Callable[[Tensor], Any] | None = None) -> Pattern:
    """A pattern for any tensor from outside the match, which becomes an input; one name always means one tensor.

    Args:
      name: its name in the match.
      where: (tensor) -> whether it may match.

    Examples:
      ```python
      from qjax.export import op, tensor

      square = op("multiply", tensor("x"), tensor("x"))  # the same tensor twice
      ```
    """
    _check_name(name)
    return Pattern("tensor", name=name, where=where)


def constant(name: str | None = None, *, where: Callable[[Tensor], Any] | None = None) -> Pattern:
    """A pattern for a constant that is read like an activation; a node's kernel and bias need no pattern.

    Args:
      name: its name in the match.
      where: (tensor) -> whether it may match.

    Examples:
      ```python
      from qjax.export import constant, op, tensor

      shifted = op("add", tensor("x"), constant("table"))
      ```
    """
    _check_name(name)
    return Pattern("constant", name=name, where=where)


def any_of(*patterns: Pattern) -> Pattern:
    """A pattern for one of several patterns; the first that leads to a match is used.

    Examples:
      ```python
      from qjax.export import any_of, match, op

      product = any_of(op("dot"), op("conv"))
      print(len(match(graph, product)))
      ```
    """
    if not patterns:
        raise ValueError("any_of: expected at least one pattern, got none.")
    for pattern in patterns:
        _require(pattern, "any_of: an alternative")
    return _check_names(Pattern("any_of", inputs=tuple(patterns)))


def optional(pattern: Pattern) -> Pattern:
    """A pattern for an `op` or nothing: without the node, its only input is matched in its place.

    Args:
      pattern: an `op` pattern.

    Examples:
      ```python
      from qjax.export import op, optional, tensor

      # with or without the reshape
      flattened = op("dot", optional(op("reshape", tensor("x"))))
      ```
    """
    _require(pattern, "optional: the argument")
    if pattern.kind != "op" or pattern.inputs is None or len(pattern.inputs) != 1:
        raise ValueError("optional: expected an op with a pattern for its one input, op('reshape', inner).")
    return any_of(pattern, pattern.inputs[0])


def check_root(pattern: Any, what: str) -> None:
    """Raise unless the pattern describes a node."""
    _require(pattern, what)
    if any(root.kind != "op" for root in pattern.roots()):
        raise ValueError(f"{what}: expected an op, or any_of of ops, for the output of a match; got a bare tensor.")


def _require(pattern: Any, what: str) -> None:
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{what}: expected a Pattern (op, tensor, constant, any_of), got {type(pattern).__name__}.")


def _check_name(name: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name or "/" in name or "#" in name):
        raise ValueError(f"name: expected a string without '/' and '#' as a pattern's name, got {name!r}.")


def _check_names(pattern: Pattern) -> Pattern:
    named: dict[str, Pattern] = {}
    for part in pattern.walk():
        if part.name is not None and named.setdefault(part.name, part) != part:
            raise ValueError(f"Two different patterns are called {part.name!r}: a name stands for one node or tensor.")
    return pattern
