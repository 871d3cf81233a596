"""Facts: what an operation declares about itself, for the annotator, the lowering and the passes.

These never test an operation's name; they ask for a fact. A fact has a default only if the default is safe, so that the
conversion at worst refuses or computes something unnecessary. An operation must state every other fact itself, see
`ops.required`.
"""

import abc
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from qjax.numerics.rules import Product

Attributes = Mapping[str, Any]
Shape = Sequence[int | None]
"""The sizes of a tensor's axes; None is the batch, whose size is free."""
Filling = Literal["none", "zero", "lowest", "constants"]
End = Literal["low", "high"]
Follows = Literal["sizes", "ends"]
"""How an attribute depends on the batch size: it contains sizes of axes, or the ends of axes."""


class Role(enum.Enum):
    """How an operation treats the quantization parameters (the grid) of its input.

    PRODUCER: computes an integer accumulator with its own scale; a quantizer follows its chain. CHAIN: an affine step
    or a clamp that is folded into the requantization of the producer before it. QUANTIZER: ends a chain by turning the
    accumulator into codes. Only a quantized graph has one. GRID: moves or selects codes; the output shares the input's
    scale and zero point. INTEGER: reads codes or integers and returns plain integers or booleans (an index, a
    comparison).
    """

    PRODUCER = "producer"
    CHAIN = "chain"
    QUANTIZER = "quantizer"
    GRID = "grid"
    INTEGER = "integer"


class Facts(abc.ABC):
    """The facts of an operation; a subclass states those without a safe default, and those that differ from it."""

    label: ClassVar[str | None] = None
    """CHAIN: the name of its tensor if the op starts a rescale of its own. None: the op's own name."""

    clamps: ClassVar[bool] = False
    """CHAIN, which must state it: whether it bounds numbers (`Op.bounds`), so no later affine step joins its chain."""

    vanishes: ClassVar[bool] = False
    """CHAIN: whether the codes are the input's, so that the graph has no node for it."""

    tabulates: ClassVar[bool] = False
    """PRODUCER: whether it is a lookup table, so that an input range that is too wide wastes codes."""

    may_be_probabilities: ClassVar[bool] = False
    """PRODUCER: whether results between 0 and 1 are those of a softmax or of a sigmoid."""

    free: ClassVar[Mapping[str, Follows]] = {}
    """Attributes that may depend on the batch size. Any other attribute that does is an error of the conversion."""

    per_example: ClassVar[str | None] = None
    """The role of a constant that may have a row for each example. The graph has one row, so all must be equal."""

    sizes_only: ClassVar[bool] = False
    """GRID: whether it reads only the size of its input, so that its result has a grid of its own."""

    reals: ClassVar[bool] = False
    """INTEGER: whether it may read and compute floats, in float parts of a model."""

    indexed: ClassVar[str | None] = None
    """The role of the constant whose rows the integer input selects."""

    one_order: ClassVar[bool] = False
    """Whether axis i of each input is axis i of the result, so that all may be stored in another order of axes."""

    by_row: ClassVar[str | None] = None
    """GRID with a weight: the op that it becomes if the recipe asks for one scale per row of the weight."""

    read_as: ClassVar[str | None] = None
    """The word in weight names that replaces the op's own name, because names must not depend on the recipe."""

    wide_zero_point: ClassVar[int | None] = None
    """PRODUCER: the zero point other than 0 that a runtime's own kernel uses for its 16-bit codes."""

    any_zero_point: ClassVar[bool] = False
    """PRODUCER: whether it may read such a kernel's codes in runtimes whose int16 has the zero point 0 otherwise."""

    rescales: ClassVar[bool] = False
    """PRODUCER: whether it normalises its input, so that elements that are small next to others may matter as much."""

    scales_rows: ClassVar[bool] = False
    """PRODUCER: whether its weight may have scales for rows, and for groups of rows or columns."""

    def has_integer_form(self, eqn: Any) -> bool:
        """Whether the result of the equation has codes; False for what only training computes.

        A CHAIN op must state it, because it has no kernel whose absence would stop the conversion.
        """
        return True

    def has_integer_backward(self, eqn: Any) -> bool:
        """Whether the products of the backward pass of an equation can multiply integers, see `ops.backward`."""
        return False

    def may_negate(self, attributes: Attributes) -> bool:
        """CHAIN: whether the step may multiply by a negative number, which changes the sign of a folded weight."""
        return True

    def permutation(self, attributes: Attributes) -> list[int] | None:
        """GRID: the order of the input's axes, if the op only permutes axes."""
        return None

    def commutes(self, attributes: Attributes) -> bool:
        """Whether exchanging the two inputs does not change the result."""
        return False

    def keeps_order(self, attributes: Attributes) -> bool:
        """GRID: whether the elements stay in their order, so that only the shape differs."""
        return False

    def filling(self, attributes: Attributes) -> Filling:
        """On a grid: which numbers the result contains besides those of the input; must be stated.

        "constants" are those of `Op.chain_constants`. They and "lowest" (minus infinity) can lie outside of the range
        of the input, so the calibration observes the result, see `tracing.joined`.
        """
        raise NotImplementedError

    def hides(self, eqn: Any) -> Collection[End]:
        """The ends of the input's range beyond which an element has no effect: "low" for a maximum or a softmax."""
        return ()

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        """Whether the result is the first input, whose shape is `before`."""
        return False

    def operation(self, attributes: Attributes) -> str | None:
        """PRODUCER: the operation of `ops.formulas.OPS` for a node without following steps; None: the exact sum.

        This must be stated, unless the op prepares its constants itself.
        """
        return None

    @abc.abstractmethod
    def keeps_batch(self, attributes: Attributes, inputs: Sequence[Shape]) -> bool:
        """Whether every free size of the result is that of an input.

        Raises:
          ValueError: it mixes examples of the batch, whose number is free.
        """

    def at_batch(self, attributes: Attributes, output: Shape, size: int) -> Attributes:
        """The attributes of a node whose sizes are free, traced with a batch of `size`; output: the traced shape.

        Raises:
          ValueError: the result has several axes that follow the batch.
        """
        return attributes

    def implied(self, inputs: Sequence[str]) -> str | None:
        """What `describe` prints that no attribute contains; inputs: the names of the node's inputs."""
        return None


def always(self: Any, attributes: Attributes, inputs: Sequence[Shape]) -> bool:
    """`keeps_batch` of an op whose result has no axis of its own that could depend on the batch."""
    return True


def no_filling(self: Any, attributes: Attributes) -> Filling:
    """`filling` of an op whose result contains no other codes than the input."""
    return "none"


def filled_with_constants(self: Any, attributes: Attributes) -> Filling:
    """`filling` of an op whose result may contain its real constants."""
    return "constants"


def hides_low(self: Any, eqn: Any) -> Collection[End]:
    """`hides` of a maximum, or of a sum of exponentials."""
    return ("low",)


def no_formula(self: Any, attributes: Attributes) -> str | None:
    """`operation` of a producer for which no runtime has a formula of its own."""
    return None


def scale_of_input(self: Any, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
    """`scales` of a producer that adds up codes of its only input."""
    return [inputs[0]]


class ChoosesNoPlace:
    """The facts of an op whose integer operands are numbers or masks: none of them can be an index out of range."""

    def refuses(self, eqn: Any, index: int, value: Any) -> str | None:
        return None

    def misplaced(self, attributes: Attributes, constants: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        return None


class CountsProducts(abc.ABC):
    """The fact of an op whose kernel is a matrix product or a convolution."""

    @abc.abstractmethod
    def products(self, attributes: Attributes, inputs: Sequence[Sequence[int]], kernel: Sequence[int]) -> int:
        """How many products one result adds up, elements of the padding included; kernel: () without a weight.

        Zeros that a transposed convolution inserts between elements of its input are not counted.
        """


class ProductFacts(CountsProducts):
    """The facts of an op whose accumulator is a sum of products with a weight (or with another activation)."""

    permutable: ClassVar[bool]
    """Whether a transpose after the product may become its `permutation`."""

    groups_scales: ClassVar[bool]
    """Whether a weight may have scales for groups of the summed axis."""

    is_convolution: ClassVar[bool]
    """Whether the weight is a window that moves over the activations, with the attributes of `ops.conv`."""

    @abc.abstractmethod
    def channel_axis(self, attributes: Attributes) -> int:
        """The axis of the result along which a bias has one number per channel."""

    @abc.abstractmethod
    def transposed(self, attributes: Attributes, order: Sequence[int]) -> dict[str, Any]:
        """The attributes for which the result has its axes in another order; order: as `lax.transpose` takes it."""

    @abc.abstractmethod
    def kind(self, attributes: Attributes, kernel: Shape) -> Literal["dot", "conv", "depthwise"]:
        """Which of a target's choices (`Target.weighted`) applies to the product."""

    @abc.abstractmethod
    def described(self, attributes: Attributes, kernel: Shape, x: Shape) -> Product:
        """The product's sizes, by which runtimes choose kernels; x: the shape of the activations."""


class AverageFacts(abc.ABC):
    """The facts of an op whose result becomes an average if a division follows."""

    average: ClassVar[str]
    """The name of the average in `targets.Target`."""

    @abc.abstractmethod
    def is_average(self, attributes: Attributes, x: Shape, count: Any) -> bool:
        """Whether the sum divided by `count` (int, int32 array) is that average; x: the shape of what is summed."""

    @abc.abstractmethod
    def is_spatial(self, attributes: Attributes, x: Shape) -> bool:
        """Whether it runs over height and width of an NHWC tensor, for which runtimes have special kernels."""
