"""Matrix products of any rank: dense layers, LinearGeneral, Einsum, attention's products of activations."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, NotRequired

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.numerics.fence import laid_out_on_cpu
from qjax.numerics.rules import Product as RuleProduct
from qjax.numerics.softfloat import Real
from qjax.ops import accumulate, accumulator_bounds, grouped_dot, narrow_accumulator, products
from qjax.ops.backward import Half
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Preparation,
    Quantized,
    Role,
    Shape,
    Site,
    real,
    register,
)
from qjax.ops.channels import turned, weight_to_result
from qjax.ops.composed import Codes, Part, Steps, symmetric
from qjax.ops.epilogue import Affine, finish, finish_weighted
from qjax.ops.exact_float import Product, matmul_codes
from qjax.ops.facts import ProductFacts, always
from qjax.ops.fields import Natural
from qjax.ops.fields import Product as ProductFields
from qjax.ops.float_accumulator import Pending


class Fields(ProductFields):
    """The axes that are summed, and those that both operands share, as in `lax.dot_general`.

    factor: of a product of activations whose formula takes one, see `Target.scaled_matmul`.
    """

    lhs_contracting: list[Natural]
    rhs_contracting: list[Natural]
    lhs_batch: list[Natural]
    rhs_batch: list[Natural]
    factor: NotRequired[float]


@register
class Dot(ProductFacts, Op):
    """`lax.dot_general`: y[b, m, n] = sum_k x[b, m, k] w[b, k, n], for any number of axes of each kind."""

    name = "dot"
    fields = Fields
    role = Role.PRODUCER
    primitives = ("dot_general",)
    permutable = True
    is_convolution = False
    traced_once = True
    groups_scales = True
    keeps_batch = always
    takes_steps = True

    def kind(self, attributes: Attributes, kernel: Shape) -> Literal["dot", "conv", "depthwise"]:
        return "dot"

    def channel_axis(self, attributes: Attributes) -> int:
        return attributes["channels"][-1][0]

    def transposed(self, attributes: Attributes, order: Sequence[int]) -> dict[str, Any]:
        before = attributes["permutation"]
        total = list(order) if before is None else [before[axis] for axis in order]
        return {**attributes, "permutation": total, "channels": turned(attributes["channels"], order)}

    def described(self, attributes: Attributes, kernel: Shape, x: Shape) -> RuleProduct:
        shape = [n or 1 for n in kernel]
        summed = attributes["rhs_contracting" if attributes["weight"] == 1 else "lhs_contracting"]
        depth = math.prod(shape[axis] for axis in summed)
        return RuleProduct(depth, math.prod(shape) // depth)

    def has_integer_backward(self, eqn: Equation) -> bool:
        return True

    def products(self, attributes: Attributes, inputs: Sequence[Sequence[int]], kernel: Sequence[int]) -> int:
        weight = attributes["weight"]
        lhs, rhs = inputs if weight is None else (inputs[0], kernel) if weight == 1 else (kernel, inputs[0])
        # both operands have the summed axes and the batch axes; they count once
        shared = {*attributes["rhs_contracting"], *attributes["rhs_batch"]}
        return math.prod(lhs) * math.prod(size for axis, size in enumerate(rhs) if axis not in shared)

    def operation(self, attributes: Attributes) -> str | None:
        return "matmul"

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not all(constant)

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        return 1 if constant[1] else 0 if constant[0] else None

    def weight_axes(self, eqn: Equation, index: int) -> tuple[int, ...]:
        contracting = eqn.params["dimension_numbers"][0][index]
        return tuple(axis for axis in range(len(eqn.in_shapes[index])) if axis not in contracting)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        return {
            "lhs_contracting": list(lc),
            "rhs_contracting": list(rc),
            "lhs_batch": list(lb),
            "rhs_batch": list(rb),
        }

    def channels(self, eqn: Equation, index: int) -> list[list[int]]:
        """[axis of the result, axis of operand `index`] for every axis that is not summed."""
        contracting, batch = (tuple(d) for d in (eqn.params["dimension_numbers"]))
        rank = [len(s) for s in eqn.in_shapes]
        free = [[a for a in range(rank[i]) if a not in contracting[i] and a not in batch[i]] for i in (0, 1)]
        start = len(batch[0]) + (len(free[0]) if index == 1 else 0)
        pairs = [[out, axis] for out, axis in enumerate(batch[index])]
        return pairs + [[start + out, axis] for out, axis in enumerate(free[index])]

    def product(self, eqn: Equation) -> Product:
        """The equation's product of two float or int32 arrays."""
        numbers = eqn.params["dimension_numbers"]
        return lambda a, b, kind, precision: products.dot_general(a, b, numbers, kind, precision)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, w = inputs
        if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
            return eqn.bind(real(x), real(w))
        for index, operand in enumerate((x, w)):
            if operand.qparams.spec.group_size is not None:
                return grouped_dot.training(eqn, (x, w)[1 - index], operand, index, self.channels(eqn, index))
        numbers = eqn.params["dimension_numbers"]

        def integers(a: jax.Array, b: jax.Array, zero_a: jax.Array | None, zero_b: jax.Array | None) -> jax.Array:
            return accumulate.corrected(accumulate.dot(a, b, numbers), a, b, zero_a, zero_b, numbers)

        left, right = self.channels(eqn, 0), self.channels(eqn, 1)
        apart = left, right[: len(numbers[1][1])]
        ranks = len(x.shape), len(w.shape)
        halves = half_of(numbers, ranks, 0), half_of(numbers, ranks, 1)
        acc = matmul_codes(x, w, numbers[0][::-1], self.product(eqn), eqn, integers, apart=apart, halves=halves)
        scale = _in_result(x, left, acc.ndim) * _in_result(w, right, acc.ndim)
        return [Pending.start(acc, lax.stop_gradient(scale), eqn.out_dtypes[0], rounded=any(eqn.fixed))]

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        if attributes["weight"] is None:
            return constants
        summed = tuple(attributes["rhs_contracting" if attributes["weight"] == 1 else "lhs_contracting"])
        return narrow_accumulator.fold(attributes, constants, summed)

    def composed(self, given: Preparation, steps: Steps) -> list[Part] | None:
        return _with_factor(given, given.affine, steps)

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0] * inputs[1]]

    def accumulator(self, site: Site) -> Bounds | None:
        found = zip(site.inputs, _summed(site.attributes), strict=True)
        counts = [accumulator_bounds.count(x.shape, axes) for x, axes in found]
        if site.attributes["weight"] is not None:
            return accumulator_bounds.weighted(site)
        x, w = site.inputs
        return accumulator_bounds.within(counts[0] * accumulator_bounds.reach(x) * accumulator_bounds.reach(w))

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return _summed(attributes)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        weight = attributes["weight"]
        if weight is None:
            return finish([_activations(attributes, constants, *inputs)], constants, attributes)
        accumulator = narrow_accumulator.accumulator_of(attributes, constants)
        if accumulator.ordered:
            rows = self.rows(attributes, constants, inputs[0], accumulator)
            acc = narrow_accumulator.sum_rows(accumulator, rows, constants["zero_point0"])
        else:
            x = accumulate.signed(inputs[0])
            operands = (x, constants["kernel"]) if weight == 1 else (constants["kernel"], x)
            acc = accumulate.dot(*operands, _numbers(attributes))
        if attributes["permutation"] is not None:
            acc = jnp.transpose(acc, attributes["permutation"])
        return finish_weighted(narrow_accumulator.cut(acc, accumulator, constants), constants, attributes)

    def rows(
        self, attributes: Attributes, constants: Constants, x: jax.Array, accumulator: Accumulator = EXACT
    ) -> narrow_accumulator.Rows:
        """The operands with K first, in the order in which the activation's contracting axes are stored."""
        contracting, batch = _numbers(attributes)
        weight = attributes["weight"]
        w = jnp.asarray(constants["kernel"])
        own, other = (contracting[1 - weight], contracting[weight])
        order = sorted(range(len(own)), key=lambda i: own[i])

        def laid_out(value: jax.Array, summed: Sequence[int], kept: Sequence[int]) -> tuple[jax.Array, list[int]]:
            free = [axis for axis in range(value.ndim) if axis not in summed and axis not in kept]
            k, b, m = (math.prod(value.shape[axis] for axis in axes) for axes in (summed, kept, free))
            sizes = [value.shape[axis] for axis in free]
            return jnp.transpose(value, (*summed, *kept, *free)).reshape(k, b, m), sizes

        x_rows, x_free = laid_out(x, [own[i] for i in order], batch[1 - weight])
        w_rows, w_free = laid_out(w, [other[i] for i in order], batch[weight])
        sizes = [x.shape[axis] for axis in batch[1 - weight]]

        def restore(acc: jax.Array) -> jax.Array:
            if weight == 1:
                return acc.reshape(*sizes, *x_free, *w_free)
            return jnp.swapaxes(acc, 1, 2).reshape(*sizes, *w_free, *x_free)

        return narrow_accumulator.Rows(x_rows, w_rows, restore)


def _summed(attributes: Attributes) -> list[list[int]]:
    """For each activation, the axes that are summed."""
    axes, weight = [attributes["lhs_contracting"], attributes["rhs_contracting"]], attributes["weight"]
    return axes if weight is None else [axes[1 - weight]]


def _numbers(attributes: Attributes) -> Any:
    return (
        (tuple(attributes["lhs_contracting"]), tuple(attributes["rhs_contracting"])),
        (tuple(attributes["lhs_batch"]), tuple(attributes["rhs_batch"])),
    )


def _activations(attributes: Attributes, constants: Constants, x: jax.Array, w: jax.Array) -> jax.Array:
    """The int32 product of two activations on the int8 path, which allows any zero point."""
    numbers = _numbers(attributes)
    z_x = constants["zero_point0"] - accumulate.signed_offset(x.dtype.name)
    z_w = constants["zero_point1"] - accumulate.signed_offset(w.dtype.name)
    x, w = accumulate.signed(x), accumulate.signed(w)
    acc = accumulate.corrected(accumulate.dot(x, w, numbers), x, w, z_x, z_w, numbers)
    return acc if attributes["permutation"] is None else jnp.transpose(acc, attributes["permutation"])


def half_of(numbers: Any, ranks: tuple[int, int], index: int) -> Half:
    """The gradient of operand `index`: over the batch axes, the cotangent times the other operand."""
    contracting, batch = numbers
    other, first = 1 - index, len(batch[0])
    free = [[a for a in range(ranks[i]) if a not in contracting[i] and a not in batch[i]] for i in (0, 1)]
    start = first, first + len(free[0])
    summed = tuple(range(start[other], start[other] + len(free[other])))
    # the summed axes of the forward, in the order in which the other operand has them
    order = sorted(range(len(contracting[other])), key=lambda i: contracting[other][i])
    shared = [contracting[other][i] for i in order]
    back = [contracting[index][i] for i in order]
    axes = [*batch[index], *free[index], *back] if index == 0 else [*batch[index], *back, *free[index]]
    permutation = [axes.index(axis) for axis in range(ranks[index])]

    def product(g: jax.Array, x: jax.Array, zero: jax.Array | None) -> jax.Array:
        batches = tuple(range(first))
        if index == 0:
            own = (summed, tuple(free[other])), (batches, tuple(batch[other]))
            acc = accumulate.corrected(accumulate.dot(g, x, own), g, x, None, zero, own)
        else:
            # XLA has no fast int8 product on the CPU whose first operand is summed along its first axis
            x = laid_out_on_cpu(jnp.transpose(x, (*batch[other], *shared, *free[other])))
            own = (tuple(range(first + len(shared), x.ndim)), summed), (batches, batches)
            acc = accumulate.corrected(accumulate.dot(x, g, own), x, g, zero, None, own)
        return jnp.transpose(acc, permutation)

    def spread(of_g: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_g = jnp.squeeze(of_g, summed)
        of_x = jnp.transpose(of_x, (*batch[other], *shared, *free[other]))
        of_x = jnp.squeeze(of_x, tuple(range(first + len(shared), of_x.ndim)))
        inside = tuple(range(first, first + len(free[index] if index == 0 else shared)))
        behind = tuple(range(ranks[index] - len(shared if index == 0 else free[index]), ranks[index]))
        grown = (behind, inside) if index == 0 else (inside, behind)
        both = jnp.expand_dims(of_g, grown[0]), jnp.expand_dims(of_x, grown[1])
        return jnp.transpose(both[0], permutation), jnp.transpose(both[1], permutation)

    def terms(g: Sequence[int], x: Sequence[int]) -> int:
        return math.prod(g[axis] for axis in summed)

    return Half(product, (summed, tuple(free[other])), tuple(zip(summed, free[other], strict=True)), terms, spread)


def _in_result(value: Quantized, channels: list[list[int]], rank: int) -> jax.Array:
    vector = weight_to_result(value.scale, channels, rank)
    return vector.reshape((1,) * (rank - vector.ndim) + tuple(vector.shape))


def _with_factor(given: Preparation, affine: Affine, steps: Steps) -> list[Part] | None:
    """A product of two activations followed by a factor; None if there is no factor, or any other step.

    No runtime's product of activations takes a factor g. With y's scale s_y and zero point z_y,

        p = x w, scale s_y / |g|, zero point z_y         BATCH_MATMUL
        y = p |g|, the constant being the code 1         MUL

    rounds only once: the codes of p are those of y, because the scales cancel. This requires that g is not negative.
    """
    y, attributes = given.output, given.attributes
    numbers = [value for _, constants in steps for value in constants.values()]
    if attributes["weight"] is not None or not steps or y.dtype not in ("int8", "int16"):
        return None
    if any(own.get("step") not in ("mul", "div") for own, _ in steps) or any(
        math.prod(np.shape(n)) != 1 for n in numbers
    ):
        return None
    factor = abs(affine.g).maximum(Real.of(np.float32(2.0**-100))).reshape(())
    scale = (Real.of(y.scale) / factor).to_float32()
    product = Part("product", "dot", (0, 1), y.shape, dataclasses.replace(y, shape=(), scale=scale), attributes)
    grid = symmetric(factor, 8 if y.dtype == "int8" else 16)
    shape = (1,) * len(y.shape)
    code = affine.g.reshape(shape).sign.astype(y.dtype)
    constant = Codes("factor", code, dataclasses.replace(grid, shape=shape))
    return [product, Part("scaled", "multiply", (product, constant), y.shape, finishes=True)]
