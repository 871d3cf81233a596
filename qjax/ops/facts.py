"""Facts: what an operation declares about itself, for the annotator, the lowering and the passes.

These never test an operation's name; they ask for a fact. A fact has a default only if the default is safe: the
conversion then refuses, or computes something unnecessary. An operation must state every other fact itself, see
`ops.required`.
"""

import abc
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from qjax.numerics.rules import Product

Attributes = Mapping[str, Any]
Shape = Sequence[int | None]
"""None is the batch, whose size is free."""
Filling = Literal["none", "zero", "lowest", "constants"]
End = Literal["low", "high"]
Follows = Literal["sizes", "ends"]
"""How an attribute follows the batch: it holds sizes of axes, or the ends of axes."""


class Role(enum.Enum):
    """What an operation does with the quantization parameters (the grid) of its input.

    PRODUCER: computes an integer accumulator with its own scale; a quantizer follows its chain.
    CHAIN: an affine step or a clamp that is folded into the requantization of the producer before it.
    QUANTIZER: ends a chain: makes codes of the accumulator. Only a quantized graph has one.
    GRID: moves or selects codes; the output shares the input's scale and zero point.
    INTEGER: reads codes or integers and returns plain integers or booleans (an index, a comparison).
    """

    PRODUCER = "producer"
    CHAIN = "chain"
    QUANTIZER = "quantizer"
    GRID = "grid"
    INTEGER = "integer"


class Facts(abc.ABC):
    """The facts of an operation; a subclass states those without a safe default, and those that differ from it."""

    label: ClassVar[str | None] = None
    """CHAIN: what a tensor is named after if the op starts a rescale of its own. None: the op's own name."""

    clamps: ClassVar[bool] = False
    """CHAIN, which must state it: bounds numbers (`Op.bounds`), so no affine step behind it can join the same chain."""

    vanishes: ClassVar[bool] = False
    """CHAIN: the codes are the input's, so the graph has no node for it."""

    tabulates: ClassVar[bool] = False
    """PRODUCER: looks every code up in a table, so a range that is too wide costs it codes."""

    may_be_probabilities: ClassVar[bool] = False
    """PRODUCER: where its results lie between 0 and 1, they are those of a softmax or of a sigmoid."""

    free: ClassVar[Mapping[str, Follows]] = {}
    """Attributes that may follow the size of the batch. Any other that does is an error of the conversion."""

    per_example: ClassVar[str | None] = None
    """The role of a constant that may have a row for each example. The graph keeps one of them: all must be equal."""

    sizes_only: ClassVar[bool] = False
    """GRID: reads the size of its input and none of its codes, so its result is on a grid of its own."""

    reals: ClassVar[bool] = False
    """INTEGER: may read and compute floats, in float parts of a model."""

    indexed: ClassVar[str | None] = None
    """The role of the constant whose rows the integer input chooses."""

    one_order: ClassVar[bool] = False
    """Whether axis i of each input is axis i of the result, so that all may be held in another order of their axes."""

    by_row: ClassVar[str | None] = None
    """GRID with a weight: the op that it becomes where the recipe gives the weight's rows scales of their own."""

    read_as: ClassVar[str | None] = None
    """What the names of weights say in place of the op's own name: they do not depend on the recipe."""

    wide_zero_point: ClassVar[int | None] = None
    """PRODUCER: the zero point other than 0 that a runtime's own kernel gives its codes of 16 bits."""

    any_zero_point: ClassVar[bool] = False
    """PRODUCER: whether runtimes whose int16 has the zero point 0 read the codes of such a kernel here."""

    rescales: ClassVar[bool] = False
    """PRODUCER: brings its input to one size, so that elements that were small beside others may matter as much."""

    scales_rows: ClassVar[bool] = False
    """PRODUCER: its weight has scales of its rows, of groups of them, or of groups of columns as well."""

    def has_integer_form(self, eqn: Any) -> bool:
        """Whether the equation has codes as its result; False for what only training computes.

        A CHAIN op must state it: it has no kernel whose absence would stop the conversion.
        """
        return True

    def may_negate(self, attributes: Attributes) -> bool:
        """CHAIN: whether the step may multiply by a number below zero, which changes the sign of a folded weight."""
        return True

    def permutation(self, attributes: Attributes) -> list[int] | None:
        """GRID: the order of the input's axes, if the op does nothing but permute axes."""
        return None

    def commutes(self, attributes: Attributes) -> bool:
        """Whether the result is the same with the two inputs exchanged."""
        return False

    def keeps_order(self, attributes: Attributes) -> bool:
        """GRID: whether the elements stay in their order, so that only the shape differs."""
        return False

    def filling(self, attributes: Attributes) -> Filling:
        """On a grid: which numbers the result holds beside those of the input; must be stated.

        "constants": those of `Op.chain_constants`. They and "lowest" (minus infinity) can lie outside of the range of
        the input, so the calibration observes the result, see `tracing.joined`.
        """
        raise NotImplementedError

    def hides(self, eqn: Any) -> Collection[End]:
        """The ends of the input's range beyond which an element has no effect: "low" for a maximum or a softmax."""
        return ()

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        """Whether the result is the first input, whose shape is `before`."""
        return False

    def operation(self, attributes: Attributes) -> str | None:
        """PRODUCER: the operation of `ops.formulas.OPS` of a node without following steps; None: the exact sum.

        Must be stated, unless the op prepares its constants itself.
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
        """What `describe` says that no attribute holds; inputs: the names of the node's inputs."""
        return None


def always(self: Any, attributes: Attributes, inputs: Sequence[Shape]) -> bool:
    """`keeps_batch` of an op whose result has no axis of its own that could follow the batch."""
    return True


def no_filling(self: Any, attributes: Attributes) -> Filling:
    """`filling` of an op whose result holds no other codes than the input."""
    return "none"


def filled_with_constants(self: Any, attributes: Attributes) -> Filling:
    """`filling` of an op whose result may hold its real constants."""
    return "constants"


def hides_low(self: Any, eqn: Any) -> Collection[End]:
    """`hides` of a maximum, or of a sum of exponentials."""
    return ("low",)


def no_formula(self: Any, attributes: Attributes) -> str | None:
    """`operation` of a producer that no runtime computes in a way of its own."""
    return None


def scale_of_input(self: Any, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
    """`scales` of a producer that adds up codes of its only input."""
    return [inputs[0]]


class ChoosesNoPlace:
    """What an op states whose integer operands are numbers or masks: none of them can point outside of a tensor."""

    def refuses(self, eqn: Any, index: int, value: Any) -> str | None:
        return None

    def misplaced(self, attributes: Attributes, constants: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        return None


class CountsProducts(abc.ABC):
    """What an op states whose kernel is a matrix product or a convolution."""

    @abc.abstractmethod
    def products(self, attributes: Attributes, inputs: Sequence[Sequence[int]], kernel: Sequence[int]) -> int:
        """How many products it adds up, elements of the padding included; kernel: () without a weight.

        Zeros that a transposed convolution puts between elements of its input are left out.
        """


class ProductFacts(CountsProducts):
    """What an op states whose accumulator is a sum of products with a weight (or with another activation)."""

    permutable: ClassVar[bool]
    """Whether a transpose behind the product may become its `permutation`."""

    groups_scales: ClassVar[bool]
    """Whether a weight may have scales for groups of the summed axis."""

    is_convolution: ClassVar[bool]
    """Whether the weight is a window that moves over the activations, with the attributes of `ops.conv`."""

    @abc.abstractmethod
    def channel_axis(self, attributes: Attributes) -> int:
        """The axis of the result along which a bias has one number per channel."""

    @abc.abstractmethod
    def transposed(self, attributes: Attributes, order: Sequence[int]) -> dict[str, Any]:
        """The attributes that result in the axes in another order; order: as `lax.transpose` takes it."""

    @abc.abstractmethod
    def kind(self, attributes: Attributes, kernel: Shape) -> Literal["dot", "conv", "depthwise"]:
        """Which of a target's choices (`Target.weighted`) the product follows."""

    @abc.abstractmethod
    def described(self, attributes: Attributes, kernel: Shape, x: Shape) -> Product:
        """The product's sizes, by which runtimes choose kernels; x: the shape of the activations."""


class AverageFacts(abc.ABC):
    """Facts of an op whose result becomes an average if a division follows."""

    average: ClassVar[str]
    """The average as `targets.Target` names it."""

    @abc.abstractmethod
    def is_average(self, attributes: Attributes, x: Shape, count: Any) -> bool:
        """Whether the sum divided by `count` (int, int32 array) is that average; x: the shape of what is summed."""

    @abc.abstractmethod
    def is_spatial(self, attributes: Attributes, x: Shape) -> bool:
        """Whether it runs over height and width of an NHWC tensor, for which runtimes have kernels of their own."""
