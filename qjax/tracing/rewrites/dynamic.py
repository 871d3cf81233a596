"""Rewrites products with `qjax.Dynamic` (activation scales at run time) or a `qjax.WeightFormat` in the recipe.

Each product of data with a weight becomes three equations:

1. One quantizes the weight and reads nothing else, so the conversion computes it once and the graph holds int8 codes.
2. One quantizes the data for all products that read it (the gates of a cell; queries, keys and values).
3. The last one multiplies.

With a weight format the data stay in float, so there is no second equation.

The recipe is not known when a model is traced, so this is not among `REWRITERS`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from qjax.numerics.dynamic_formulas import DynamicFormula
from qjax.numerics.weight_formats import WeightFormat
from qjax.ops import dynamic, dynamic_rows, formatted
from qjax.ops.dynamic import Dynamic, DynamicCodes, DynamicProduct
from qjax.ops.formatted import FormattedProduct
from qjax.ops.frozen import FrozenProduct, Use
from qjax.support.errors import refuse
from qjax.tracing.composite import Computed
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.frozen import behind, frozen_of
from qjax.tracing.shared_traces import form_of

Setting = Dynamic | WeightFormat
SettingOf = Callable[[str], Setting | None]
"""Path of a module -> how its products are computed; None means unchanged."""

_PRODUCTS = {"dot_general": "dynamic_dot", "conv_general_dilated": "dynamic_conv"}
_WEIGHT, _CODES, _FORMATTED = "dynamic_weight", "dynamic_codes", "formatted_product"

_Coded = dict[tuple[Value, DynamicCodes], tuple[Value, ...]]
"""The codes that the new program contains so far."""


def with_dynamic(
    program: Program, setting_of: SettingOf, left: Collection[Value] = (), formula: DynamicFormula = "onnx"
) -> Program:
    """Compute those products on codes, in bodies too.

    left: weights that stay in float, such as those of adapters. formula: the target's, for products that it supports.

    Raises:
      ValueError: products that cannot be computed in this way; the message names the module and the user's line of
        each.
    """
    wrong = list[str]()
    found = _with_dynamic(program, setting_of, left, formula, wrong)
    refuse(wrong)
    return found


def _with_dynamic(
    program: Program, setting_of: SettingOf, left: Collection[Value], formula: DynamicFormula, wrong: list[str]
) -> Program:
    equations: list[Equation] = []
    coded: _Coded = {}
    made: dict[Value, Equation] = {}
    for eqn in program.equations:
        made.update(dict.fromkeys(eqn.outputs, eqn))
        setting = setting_of(eqn.scope)
        weight = None if setting is None else _weight(eqn)
        if eqn.body is not None:
            body = _with_dynamic(eqn.body, setting_of, left, formula, wrong)
            equations.append(dataclasses.replace(eqn, body=body))
        elif setting is None or weight is None or eqn.inputs[weight] in left:
            equations.append(eqn)
        else:
            try:
                equations += _split(eqn, weight, setting, coded, made, formula)
            except ValueError as error:
                module = f" in module {eqn.scope!r}" if eqn.scope else ""
                wrong.append(f"{eqn.location or 'unknown line'}{module}: {error}")
    return dataclasses.replace(program, equations=tuple(equations))


def dynamic_products(program: Program) -> Iterator[tuple[Equation, DynamicProduct | FormattedProduct]]:
    """The products that `with_dynamic` made, and their equations."""
    for eqn in program.walk():
        product = product_of(eqn)
        if product is not None:
            yield eqn, product


def setting_of_product(eqn: Equation) -> Setting | None:
    """The setting of a product that `with_dynamic` made; None for any other equation."""
    product = product_of(eqn)
    return None if product is None else product.setting


def product_of(eqn: Equation) -> DynamicProduct | FormattedProduct | None:
    """The product of an equation that `with_dynamic` made."""
    function = eqn.source.function if isinstance(eqn.source, Computed) else None
    function = function.product if isinstance(function, FrozenProduct) else function
    return function if isinstance(function, DynamicProduct | FormattedProduct) else None


def weight_of(eqn: Equation) -> DynamicProduct | FormattedProduct | None:
    """The product for whose float weight this equation computes the codes."""
    function = eqn.source.function if isinstance(eqn.source, Computed) else None
    product = getattr(function, "__self__", None) if eqn.primitive == _WEIGHT else None
    return product if isinstance(product, DynamicProduct | FormattedProduct) else None


def makes_codes(eqn: Equation) -> bool:
    """Whether `with_dynamic` made the equation to compute the codes of data or of a weight."""
    return eqn.primitive in (_WEIGHT, _CODES)


def _weight(eqn: Equation) -> int | None:
    """The index of the operand that is a weight, if the other one is data."""
    if eqn.primitive not in _PRODUCTS or not all(v.is_float for v in (*eqn.inputs, *eqn.outputs)):
        return None
    fixed = [v.fixed or v.constant is not None for v in eqn.inputs]
    if eqn.primitive == "conv_general_dilated":
        return 1 if fixed == [False, True] and eqn.params["batch_group_count"] == 1 else None
    return fixed.index(True) if fixed in ([True, False], [False, True]) else None


def _split(
    eqn: Equation,
    weight: int,
    setting: Setting,
    coded: _Coded,
    made: Mapping[Value, Equation],
    formula: DynamicFormula,
) -> list[Equation]:
    if isinstance(setting, WeightFormat):
        product = FormattedProduct(eqn, weight, formatted.with_fitting_groups(setting, eqn, weight))
    else:
        setting = dynamic.with_fitting_groups(setting, eqn, weight)
        product = DynamicProduct(form_of(eqn) or eqn, weight, setting)
        formula = setting.arithmetic or formula
        problem = dynamic_rows.problem(product, formula)
        if setting.arithmetic is not None and problem is not None:
            raise ValueError(f"Dynamic(arithmetic={formula!r}): {problem}.")
        if problem is None:
            product = dataclasses.replace(product, formula=formula)
    w, x = eqn.inputs[weight], eqn.inputs[1 - weight]
    equations: list[Equation] = []

    def computed(name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], function: Any) -> None:
        source = Computed((eqn,), inputs, outputs, function)
        equations.append(dataclasses.replace(eqn, primitive=name, inputs=inputs, outputs=outputs, source=source))

    def results_of(name: str, read: tuple[Value, ...], function: Any) -> tuple[Value, ...]:
        shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in read))
        results = tuple(Value(shape.shape, shape.dtype, fixed=name == _WEIGHT) for shape in shapes)
        computed(name, read, results, function)
        return results

    # the float operands are there only for their gradients; the result does not depend on them
    kept, function, of_weight = (w,), product, product.weight_parts
    source, moves = behind(made, w)
    frozen = frozen_of(made[source]) if source in made else None
    if frozen is not None and not frozen.stack and frozen.use == use_of(product, moves):
        kept = made[source].inputs
        function = FrozenProduct(product, frozen, len(kept))
        of_weight = function.parts
    codes: tuple[Value, ...] = ()
    if isinstance(product, DynamicProduct):
        key = x, product.coding
        if key not in coded:
            coded[key] = results_of(_CODES, (x,), product.coding)
        codes = coded[key]
    parts = results_of(_WEIGHT, kept, of_weight)
    name = _FORMATTED if isinstance(product, FormattedProduct) else _PRODUCTS[eqn.primitive]
    computed(name, (x, *kept, *codes, *parts), eqn.outputs, function)
    return equations


def use_of(product: DynamicProduct | FormattedProduct, moves: tuple[Any, ...]) -> Use:
    """How a product reads a weight that passes through these moves."""
    return Use(product.setting, moves, tuple(product.eqn.in_shapes[product.weight]), product.kept)
