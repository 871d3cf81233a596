"""Products that the recipe names by `qjax.Dynamic` (scales of activations at run time) or `qjax.WeightFormat`.

Each product of data with a weight becomes three equations:

1. One quantizes the weight and reads nothing else. So the conversion computes it once, and the graph holds int8 codes.
2. One quantizes the data, for all products that read it (the gates of a cell; queries, keys and values).
3. The last one multiplies.

With a format of weights the data stay floats, so there is no second equation.

The recipe is not known when a model is read, so this is not among `REWRITERS`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from qjax.numerics.weight_formats import WeightFormat
from qjax.ops.dynamic import Dynamic, DynamicCodes, DynamicProduct
from qjax.ops.formatted import FormattedProduct
from qjax.tracing.program import Composite, Equation, Program, Value

Setting = Dynamic | WeightFormat
SettingOf = Callable[[str], Setting | None]
"""Path of a module -> how its products are computed, or None for as they are."""

_PRODUCTS = {"dot_general": "dynamic_dot", "conv_general_dilated": "dynamic_conv"}
_WEIGHT, _CODES, _FORMATTED = "dynamic_weight", "dynamic_codes", "formatted_product"

_Coded = dict[tuple[Value, DynamicCodes], tuple[Value, ...]]
"""The codes that a program has so far."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Computed(Composite):
    """An equation that another function computes.

    function: arrays -> list of arrays.
    """

    function: Callable[..., list[Any]] = lambda *args: list(args)

    def bind(self, args: Sequence[Any]) -> list[Any]:
        return self.function(*args)


def with_dynamic(program: Program, setting_of: SettingOf) -> Program:
    """The program with those products on codes, in bodies too.

    Raises:
      ValueError: a product that cannot be computed so; the message names the module and the user's line.
    """
    equations: list[Equation] = []
    coded: _Coded = {}
    for eqn in program.equations:
        setting = setting_of(eqn.scope)
        weight = None if setting is None else _weight(eqn)
        if eqn.body is not None:
            equations.append(dataclasses.replace(eqn, body=with_dynamic(eqn.body, setting_of)))
        elif setting is None or weight is None:
            equations.append(eqn)
        else:
            equations += _split(eqn, weight, setting, coded)
    return dataclasses.replace(program, equations=tuple(equations))


def dynamic_products(program: Program) -> Iterator[tuple[Equation, Setting]]:
    """The products that `with_dynamic` made, and their settings."""
    for eqn in program.walk():
        setting = setting_of_product(eqn)
        if setting is not None:
            yield eqn, setting


def setting_of_product(eqn: Equation) -> Setting | None:
    """The setting of a product that `with_dynamic` made; None for any other equation."""
    function = eqn.source.function if isinstance(eqn.source, _Computed) else None
    return function.setting if isinstance(function, DynamicProduct | FormattedProduct) else None


def makes_codes(eqn: Equation) -> bool:
    """Whether `with_dynamic` made the equation, for the products that follow."""
    return eqn.primitive in (_WEIGHT, _CODES)


def _weight(eqn: Equation) -> int | None:
    """Which operand is a weight, where the other one is data."""
    if eqn.primitive not in _PRODUCTS or not all(v.is_float for v in (*eqn.inputs, *eqn.outputs)):
        return None
    fixed = [v.fixed or v.constant is not None for v in eqn.inputs]
    if eqn.primitive == "conv_general_dilated":
        return 1 if fixed == [False, True] and eqn.params["batch_group_count"] == 1 else None
    return fixed.index(True) if fixed in ([True, False], [False, True]) else None


def _split(eqn: Equation, weight: int, setting: Setting, coded: _Coded) -> list[Equation]:
    try:
        formatted = isinstance(setting, WeightFormat)
        product = FormattedProduct(eqn, weight, setting) if formatted else DynamicProduct(eqn, weight, setting)
    except ValueError as error:
        module = f" in module {eqn.scope!r}" if eqn.scope else ""
        raise ValueError(f"{eqn.location or 'unknown line'}{module}: {error}") from None
    w, x = eqn.inputs[weight], eqn.inputs[1 - weight]
    equations: list[Equation] = []

    def computed(name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], function: Any) -> None:
        source = _Computed((eqn,), inputs, outputs, function)
        equations.append(dataclasses.replace(eqn, primitive=name, inputs=inputs, outputs=outputs, source=source))

    def made(name: str, read: Value, function: Any) -> tuple[Value, ...]:
        shapes = jax.eval_shape(function, jax.ShapeDtypeStruct(read.shape, read.dtype))
        results = tuple(Value(shape.shape, shape.dtype, fixed=read is w) for shape in shapes)
        computed(name, (read,), results, function)
        return results

    if isinstance(product, FormattedProduct):
        computed(_FORMATTED, (x, w, *made(_WEIGHT, w, product.weight_parts)), eqn.outputs, product)
        return equations
    key = x, product.coding
    if key not in coded:
        coded[key] = made(_CODES, x, product.coding)
    parts = made(_WEIGHT, w, product.weight_parts)
    # the float operands are there only for their gradients; the result does not depend on them
    computed(_PRODUCTS[eqn.primitive], (x, w, *coded[key], *parts), eqn.outputs, product)
    return equations
