"""The base class of operations: how each is read, trained, prepared and run on integers.

Every quantized operation is one file in this folder with one subclass of `Op`, registered by `@register`. The tracer,
the lowering and the interpreter ask this registry, and none of them has a list of operations of its own.

    float model    --read, training-->    fake-quantized forward
    lowered node   --prepare-->           integer constants and attributes    --kernel-->    codes
"""

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from qjax.ops.facts import Attributes, ChoosesNoPlace, Facts, Role, Shape, always
from qjax.ops.fields import NoFields
from qjax.ops.required import missing
from qjax.ops.values import Deferred as Deferred
from qjax.ops.values import Quantized as Quantized
from qjax.ops.values import real as real
from qjax.support.names import did_you_mean

Array = jax.Array | np.ndarray
Constants = Mapping[str, Any]
Unit = Literal["unsigned", "signed"]
Bounds = tuple[int, int]
"""The lowest and the highest of some integers."""


class Equation(Protocol):
    """One equation of the traced program, as far as an operation needs to see it."""

    @property
    def primitive(self) -> str: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def in_dtypes(self) -> tuple[Any, ...]: ...
    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def out_dtypes(self) -> tuple[Any, ...]: ...
    @property
    def literals(self) -> tuple[Any, ...]:
        """Per input: the value of a literal, or None."""
        ...

    @property
    def fixed(self) -> tuple[bool, ...]:
        """Per input: whether it is made of parameters and literals alone."""
        ...

    def bind(self, *args: Any) -> list[Any]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of a node as `Op.prepare` sees it.

    scale, zero_point: of a quantized tensor, arrays or tracers; None for plain integers. qmin, qmax: the range of its
    codes. shape: its sizes, None for the batch.
    """

    shape: tuple[int | None, ...]
    dtype: str
    scale: Any = None
    zero_point: Any = None
    qmin: int | None = None
    qmax: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Preparation:
    """What `Op.prepare` may read.

    attributes: the node's. constants: its own real constants by role (see `Op.chain_constants`), arrays or tracers.
    affine: the `epilogue.Affine` of the steps after it. target: the `Target` for which the graph is made.
    """

    attributes: Attributes
    constants: Constants
    inputs: tuple[Operand, ...]
    output: Operand
    affine: Any
    target: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """constants: integer arrays by role. attributes: JSON values that are added to those of the node."""

    constants: Mapping[str, Any]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A node of a finished graph. constants: the node's own by role, arrays or tracers."""

    attributes: Attributes
    constants: Constants
    inputs: tuple[Operand, ...]
    output: Operand


class Op(Facts, abc.ABC):
    """One operation. Subclasses override what differs from these defaults and from those of `Facts`.

    Some facts must be stated; `ops.required` has the table, and an operation without them cannot be registered. Every
    operation states `accumulator`, by which the conversion proves that int32 does not overflow, and `works_along` and
    `keeps_batch`, by which a graph is known to take any batch size. Sums of products and averages state more
    (`ProductFacts`, `AverageFacts`).
    """

    name: ClassVar[str]
    role: ClassVar[Role]
    fields: ClassVar[type]
    """The attributes of a node in both stages, as a `TypedDict`; any attribute that is not listed there is an error."""
    prepared: ClassVar[type] = NoFields
    """The attributes that `prepare` adds in a program."""
    primitives: ClassVar[tuple[str, ...]] = ()
    """The jaxpr primitives (or the names of qjax's own layer markers) that may be read as this op."""

    on_grid: ClassVar[bool] = False
    """CHAIN only: after a quantizer the op stays on the grid (a clamp, a cast) instead of starting a rescale."""

    prepares: ClassVar[bool] = False
    """PRODUCER only, derived from `prepare`: it makes constants apart from those of a weight, formula or 64-bit sum."""

    moves: ClassVar[bool] = False
    """GRID only: moves elements whatever they are, so it moves integers and booleans as well as codes."""

    exponential: ClassVar[bool] = False
    """Whether adding 1 to a number of the first input multiplies results by e."""

    varying: ClassVar[Collection[str]] = ()
    """Attributes that may differ between the iterations of a loop, such as the index at which a step reads its input.

    An op that has any defines `iterated`.
    """

    traced_once: ClassVar[bool] = False
    """Whether `training` of equal equations is traced once. Its results must hold no concrete numbers."""

    chooses: ClassVar[bool] = False
    """Derived from `misplaced`: whether integer inputs choose among elements."""

    takes_steps: ClassVar[bool] = False
    """PRODUCER only, which must state it: whether affine steps may be folded into its constants; clamps always may."""

    keeps: ClassVar[tuple[str, ...]] = ()
    """PRODUCER with `prepare` only: roles of constants that remain the model's own tensors, with their scales."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.prepares = cls.prepare is not Op.prepare
        cls.chooses = cls.misplaced not in (Op.misplaced, ChoosesNoPlace.misplaced)
        if cls.varying and cls.iterated is Op.iterated:
            raise TypeError(f"{cls.__name__} has `varying` attributes, so it must define `iterated`.")

    @abc.abstractmethod
    def accumulator(self, site: Site) -> Bounds | None:
        """The lowest and the highest int32 sum that the kernel may need, over all codes that the inputs may contain.

        It is None if the op sums nothing in int32, or if constants that decide it are traced. A sum over the batch
        raises `Unsupported`. The functions of `qjax.ops.accumulator_bounds` help to compute it.
        """

    @abc.abstractmethod
    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        """For each input, the axes along which the op adds, compares, selects, moves or counts elements.

        Along any other axis, an element of the result depends only on the elements at the same position (or, if shapes
        broadcast, on the one that is repeated). If no op works along the batch, a graph therefore computes each example
        independently.
        """

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        """Whether `eqn` is this op, given which of its inputs are constant (made from parameters only).

        The default expects one operand that is data; an op with more operands decides which of them may be constant.
        """
        return list(constant) == [False]

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        """The index of the operand that has a weight quantizer, if there is one."""
        return None

    def weight_axes(self, eqn: Equation, index: int) -> tuple[int, ...]:
        """The axes of that operand that have their own scales if weights are quantized per channel."""
        return ()

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        """The indices of the operands that are read as codes."""
        return (0,)

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        """The indices of the operands that are plain integers or booleans: indices, masks.

        They and those of `data` are the node's inputs, in the equation's order.
        """
        return ()

    def unit(self, eqn: Equation) -> Unit | None:
        """PRODUCER only: "unsigned" if every output lies in [0, 1], "signed" for [-1, 1]."""
        return None

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        """The fake-quantized forward of one equation; inputs are arrays or `Quantized`."""
        return eqn.bind(*(real(x) for x in inputs))

    def channels(self, eqn: Equation, index: int) -> list[list[int]]:
        """[axis of the result, axis of operand `index`] for the axes along which a weight has scales."""
        return []

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        """The static attributes of the graph's node: JSON values only."""
        return {}

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        """CHAIN, and a PRODUCER with `prepare`: role -> index of a constant operand that it uses as real numbers."""
        return {}

    def chain_axes(self, eqn: Equation, constant: Sequence[bool]) -> set[int]:
        """CHAIN only: the axes of the result along which the step's constants vary."""
        rank, axes = len(eqn.out_shapes[0]), set[int]()
        for index in self.chain_constants(eqn, constant).values():
            shape = eqn.in_shapes[index]
            axes |= {rank - len(shape) + axis for axis, size in enumerate(shape) if size != 1}
        return axes

    def compose(self, attributes: Attributes, constants: Constants, affine: Any) -> Any:
        """CHAIN only, which must state it: the `Affine` after this step."""
        raise NotImplementedError(self.name)

    def bounds(self, attributes: Attributes, constants: Constants) -> tuple[Any, Any]:
        """CHAIN only: the real bounds (low, high) of a clamp, each None if there is none."""
        return None, None

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        """PRODUCER without a weight: the scale of each accumulator, from those of its inputs (as `Real`).

        This must be stated, unless the op prepares its constants itself.
        """
        raise NotImplementedError(self.name)

    def prepare(self, given: Preparation) -> Prepared:
        """The constants of an op that `prepares`.

        Scales may be tracers, with the same bits as a result. Raises a ValueError if there is no integer form.
        """
        raise NotImplementedError(self.name)

    def in_codes(self, attributes: Attributes, constants: Constants, operand: Operand) -> Constants | None:
        """GRID and INTEGER: the numbers of `chain_constants` as int32 on the operand's grid; None if there are none.

        Scales may be tracers, with the same bits as a result.
        """
        return None

    def refuses(self, eqn: Equation, index: int, value: Any) -> str | None:
        """What is wrong with the constant integers (a NumPy array) of operand `index`, or None."""
        return None

    def misplaced(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array | None:
        """How many integer inputs are indices out of range (int32), or None if they cannot be."""
        return None

    def iterated(self, attributes: Sequence[Attributes], x: jax.Array) -> jax.Array:
        """For an op with `varying` attributes: the results for each of them, stacked along a new first axis."""
        raise NotImplementedError

    def of_stack(self, attributes: Attributes, stack: jax.Array) -> jax.Array | None:
        """The kernel on inputs that are stacked along the first axis of one array; None if there is no such form."""
        return None

    def arithmetic(self, attributes: Attributes) -> str | None:
        """For an op that `prepares`: the arithmetic that it computes in, in a few words for tables."""
        return None

    def restated(self, given: Preparation) -> Prepared | None:
        """For an op that `prepares`: new constants under a target, for a node that states some itself, as files do.

        `given.constants` are those that the node states; an op that `prepares` must define this method. None means that
        they stay, because they do not depend on any runtime's arithmetic.
        """
        raise NotImplementedError(self.name)

    def composed(self, given: Preparation, steps: Any) -> Any:
        """The node as a chain of `ops.composed.Part`, in order, for a target that composes this operation.

        given: as in `prepare`. steps: the affine steps after the node (`ops.composed.Steps`), which `given.affine`
        includes; the parts must include them too. The choice of parts may depend on shapes, dtypes, attributes and
        ranges, but never on numbers that are tracers under jit. None: the node stays as it is.
        """
        return None

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        """What the interpreter may compute once, before any input: the node's constants -> the kernel's constants."""
        return constants

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        """Codes in, codes out; only integer arithmetic."""
        raise NotImplementedError(self.name)


class Elementwise(Op):
    """An op whose results each depend only on the elements at the same position; it has no int32 sum."""

    keeps_batch = always

    def accumulator(self, site: Site) -> Bounds | None:
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [()] * len(inputs)


_ops: dict[str, Op] = {}
_by_primitive: dict[str, list[Op]] = {}


OpT = TypeVar("OpT", bound=Op)


def register(cls: type[OpT]) -> type[OpT]:
    """Class decorator: makes one instance of the op known to the tracer, the lowering and the interpreter.

    Raises:
      TypeError: an op that does not state all facts: an abstract method, or a declared attribute without a value.
    """
    unstated = missing(cls, (Op, Facts))
    if unstated:
        raise TypeError(
            f"The operation {cls.__name__!r} does not state {', '.join(unstated)}. Define what is missing, see "
            "`qjax.ops.base.Op` and `qjax.ops.required`: without these facts wrong codes would pass unseen."
        )
    if getattr(cls, "clamps", False) != (cls.bounds is not Op.bounds):
        raise TypeError(f"The operation {cls.__name__!r} must state `clamps = True` if it defines `bounds`.")
    op = cls()
    if op.name in _ops:
        raise ValueError(f"Two operations are registered under the name {op.name!r}.")
    _ops[op.name] = op
    for primitive in op.primitives:
        _by_primitive.setdefault(primitive, []).append(op)
    return cls


def get(name: str) -> Op:
    """The operation with that name."""
    if name not in _ops:
        raise ValueError(
            f"Unknown operation {name!r}.{did_you_mean(name, _ops)} Known operations: {', '.join(sorted(_ops))}."
        )
    return _ops[name]


def names() -> tuple[str, ...]:
    """The names of all registered operations."""
    return tuple(sorted(_ops))


def read(eqn: Equation, constant: Sequence[bool]) -> Op | None:
    """The operation that an equation is, or None if qjax has no integer form for it."""
    reals = any(jnp.issubdtype(dtype, jnp.floating) for dtype in (*eqn.in_dtypes, *eqn.out_dtypes))
    for op in _by_primitive.get(eqn.primitive, ()):
        # an operation on codes must not read plain integers (masks, positions, counts)
        if (reals or op.moves or op.role is Role.INTEGER) and op.reads(eqn, constant):
            return op
    return None


def centered(codes: jax.Array, constants: Constants, index: int) -> jax.Array:
    """int32 `codes - zero_point` of data input `index`."""
    return codes.astype(jnp.int32) - jnp.broadcast_to(jnp.asarray(constants[f"zero_point{index}"]), codes.shape)
