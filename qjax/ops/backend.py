"""A node that a vendor's kernel computes instead of several matched operations, its members.

The node's attributes contain all attributes of its members as JSON. Its constants contain those of the members, under
`label/role`. The vendor registers the kernel under two names, the backend's and the pattern's. A file stores only these
names and no code, so a process that has not registered the kernel cannot run the graph. If the backend is None, the
members' own kernels run one after the other.

A member is a list of [field, value] with the fields in `FIELDS`:

| field | value |
| --- | --- |
| label | its name within the node: the pattern's, or the operation's |
| op, name, location | those of the matched node |
| inputs | for each input: an index into the node's inputs, or the label of the member that computes it |
| output | the name of its tensor, then shape (null is the batch), dtype, qmin, qmax (null without a scale) |
| attributes | [name, value] for each attribute |
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, cast

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Bounds, Constants, Op, Role, Shape, Site, get, names, register
from qjax.ops.facts import always, no_formula

NAME = "backend"
"""The operation's name in a graph."""

FIELDS = ("label", "op", "name", "location", "inputs", "output", "attributes")
ZERO = "zero"
"""Role of a constant `label/zero`: the code of 0 on the grid of a tensor inside, and that grid as its quantization."""


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """One matched operation, as a kernel sees it.

    label: its name within the node. op, name, location: of the matched node. inputs: per input the index of one of the
    fused node's inputs, or the label of a member. tensor, shape, dtype, qmin, qmax: of its output; a shape's None is
    the batch. attributes: as `kernels.attributes` returns them, with the output's dtype and range.
    constants: arrays by role, among them `zero_point0`, ... of its inputs and `y_zero_point` of its output.
    """

    label: str
    op: str
    name: str
    location: str | None
    inputs: tuple[int | str, ...]
    tensor: str
    shape: tuple[int | None, ...]
    dtype: str
    qmin: int | None
    qmax: int | None
    attributes: Mapping[str, Any]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, *inputs: jax.Array) -> jax.Array:
        """The operation's own kernel on codes, under the rule of the backend's target."""
        op = get(self.op)
        return op.kernel(self.attributes, op.runtime(self.attributes, self.constants), inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """What a kernel is told about its node.

    members: by label, in execution order. constants: the arrays that the pattern's `prepare` made, by role. dtype,
    qmin, qmax: of the codes to return. zero_point: theirs, int32 (None without a scale).
    """

    members: Mapping[str, Member]
    constants: Mapping[str, Any]
    dtype: str
    qmin: int | None
    qmax: int | None
    zero_point: Any

    def __getitem__(self, label: str) -> Member:
        """The member with that label; an optional one may be absent: `label in node`."""
        if label not in self.members:
            raise KeyError(f"No member {label!r} was matched. The matched ones are: {', '.join(self.members)}.")
        return self.members[label]

    def __contains__(self, label: str) -> bool:
        return label in self.members


Kernel = Callable[[Sequence[jax.Array], Fused], jax.Array]
"""(codes of the inputs, description of the node) -> codes of the output. Pure JAX, integers only."""

_kernels: dict[str, Mapping[str, Kernel]] = {}


def register_kernels(backend: str, kernels: Mapping[str, Kernel]) -> None:
    """Register a backend's kernels by their patterns' names; other kernels under the same name are an error."""
    if _kernels.setdefault(backend, dict(kernels)) != dict(kernels):
        raise ValueError(
            f"Other kernels are registered under the backend {backend!r}. Compiled graphs may use them, so give the "
            "new backend another name, for example with a version in it."
        )


def registered() -> tuple[str, ...]:
    """The names of the backends whose kernels are known here."""
    return tuple(sorted(_kernels))


def kernel_of(attributes: Attributes) -> Kernel:
    """The kernel that computes a node. Raises a ValueError that names the backend if it is not registered."""
    backend, pattern = attributes.get("backend"), str(attributes.get("pattern"))
    if backend is None:
        return compose
    if backend not in _kernels:
        raise ValueError(
            f"it needs the kernel {pattern!r} of the backend {backend!r}, which is not registered in this process. "
            "Import the vendor's module and call qjax.export.register_backend(backend) first. "
            f"Registered: {', '.join(registered()) or 'none'}."
        )
    if pattern not in _kernels[backend]:
        raise ValueError(
            f"it needs the kernel {pattern!r}, but the backend {backend!r} that is registered here only has "
            f"{', '.join(_kernels[backend])}: use the version that made the graph, or convert again."
        )
    return _kernels[backend][pattern]


def compose(inputs: Sequence[jax.Array], node: Fused) -> jax.Array:
    """Run the members' own kernels one after the other, as the graph would without a backend.

    Args:
      inputs: codes, in the order of the pattern's tensors.
      node: the fused node.

    Examples:
      ```python
      from qjax.export import Backend, Fusion, compose, op

      device = Backend(
          "composing_device", "tflite_micro", [Fusion("linear", op("dot"), compose)]
      )
      assert jnp.array_equal(qjax.convert(qmodel, x, target=device)(x), graph(x))
      ```
    """
    values: dict[int | str, jax.Array] = dict(enumerate(inputs))
    out = inputs[0]
    for label, member in node.members.items():
        out = values[label] = member.run(*(values[source] for source in member.inputs))
    return out


def members_of(attributes: Attributes) -> dict[str, Member]:
    """The members of a node in execution order, without their constants. Raises ValueError for malformed ones."""
    entries, dtypes = attributes.get("members"), attributes.get("input_dtypes")
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError("its attribute 'members' must be a list of members.")
    found: dict[str, Member] = {}
    for entry in cast("list[Any]", entries):
        fields = _pairs(entry, "a member")
        if tuple(fields) != FIELDS:
            raise ValueError(f"a member has the fields {', '.join(FIELDS)}. Got {', '.join(map(str, fields))}.")
        label, output = fields["label"], fields["output"]
        if type(label) is not str or label in found or "/" in label:
            raise ValueError(f"a member's label must be a unique string without '/'. Got {label!r}.")
        if fields["op"] not in names() or fields["op"] == NAME:
            raise ValueError(f"its member {label!r} has the unknown operation {fields['op']!r}.")
        if not isinstance(output, (list, tuple)) or len(cast("list[Any]", output)) != 5:
            raise ValueError(f"its member {label!r}: output must be [name, shape, dtype, qmin, qmax]. Got {output!r}.")
        sources: list[int | str] = list(fields["inputs"])
        kinds: list[str | None] = []
        for source in sources:
            if type(source) is str and source in found:
                kinds.append(found[source].dtype)
            elif type(source) is int and source >= 0 and (dtypes is None or source < len(dtypes)):
                kinds.append(None if dtypes is None else dtypes[source])
            else:
                raise ValueError(f"its member {label!r} reads {source!r}, which is no input and no earlier member.")
        tensor, shape, dtype, qmin, qmax = cast("list[Any]", output)
        facts: dict[str, Any] = {"dtype": dtype, "input_dtypes": kinds}
        if qmin is not None:
            facts |= {"qmin": qmin, "qmax": qmax}
        found[label] = Member(
            label,
            fields["op"],
            fields["name"],
            fields["location"],
            tuple(sources),
            tensor,
            tuple(shape),
            dtype,
            qmin,
            qmax,
            {**_pairs(fields["attributes"], f"the attributes of {label!r}"), **facts},
        )
    return found


def fused(attributes: Attributes, constants: Constants) -> Fused:
    """What a node's kernel receives, made from the node's attributes and the constants of `kernels.prepare`."""
    bare = members_of(attributes)
    last = next(reversed(bare))
    members: dict[str, Member] = {}
    for label, member in bare.items():
        own = {
            role.removeprefix(f"{label}/"): value
            for role, value in constants.items()
            if role.startswith(f"{label}/") and role != f"{label}/{ZERO}"
        }
        for index, source in enumerate(member.inputs):
            role = f"zero_point{source}" if isinstance(source, int) else f"{source}/{ZERO}"
            if role in constants:
                own[f"zero_point{index}"] = _int32(constants[role])
        role = "y_zero_point" if label == last else f"{label}/{ZERO}"
        if role in constants:
            own["y_zero_point"] = _int32(constants[role])
        members[label] = dataclasses.replace(member, constants=own)
    prepared = {role: value for role, value in constants.items() if "/" not in role and not _is_zero_point(role)}
    return Fused(
        members,
        prepared,
        attributes["dtype"],
        attributes.get("qmin"),
        attributes.get("qmax"),
        constants.get("y_zero_point"),
    )


class Fields(TypedDict):
    """members: those of the pattern, see the module. backend: None for a group of `compare`."""

    backend: str | None
    pattern: str
    members: list[Any]


@register
class Backend(Op):
    """Codes -> codes by a registered kernel; see the module's docstring. Never read from a jaxpr."""

    name = NAME
    fields = Fields
    role = Role.PRODUCER
    keeps_batch = always
    takes_steps = False
    operation = no_formula

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        raise NotImplementedError("A fused node takes its constants from its members, which are prepared already.")

    def accumulator(self, site: Site) -> Bounds | None:
        # the members' accumulators were bounded before they were fused
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        # a vendor's kernel can mix elements along any axis
        return [range(len(shape)) for shape in inputs]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        node = fused(attributes, constants)
        codes = kernel_of(attributes)(list(inputs), node)
        wanted = list(node.members.values())[-1].shape
        shape, dtype = getattr(codes, "shape", None), str(getattr(codes, "dtype", type(codes).__name__))
        fits = shape is not None and len(shape) == len(wanted)
        fits = fits and all(size in (None, got) for size, got in zip(wanted, cast("Any", shape), strict=True))
        if dtype != node.dtype or not fits:
            asked = ", ".join("batch" if size is None else str(size) for size in wanted)
            raise ValueError(
                f"Backend {attributes.get('backend')!r}, pattern {attributes.get('pattern')!r}: the kernel must return "
                f"codes of {node.dtype} and shape ({asked}). Got {dtype} and shape {shape}."
            )
        return codes


def _is_zero_point(role: str) -> bool:
    return role == "y_zero_point" or (role.startswith("zero_point") and role[10:].isdigit())


def _int32(value: Any) -> Any:
    return value.astype("int32") if hasattr(value, "astype") else jnp.int32(value)


def _pairs(value: Any, what: str) -> dict[str, Any]:
    """A list of [key, value] pairs as a dict."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list of [name, value]. Got {type(value).__name__}.")
    found: dict[str, Any] = {}
    for pair in cast("list[Any]", value):
        if not isinstance(pair, (list, tuple)) or len(cast("list[Any]", pair)) != 2 or type(pair[0]) is not str:
            raise ValueError(f"{what} must be a list of [name, value]. Got {str(cast('Any', pair))[:60]}.")
        found[pair[0]] = pair[1]
    return found
