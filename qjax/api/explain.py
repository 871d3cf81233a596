"""Shows what each equation of a model becomes: an integer kernel, a table, float by the recipe, or nothing yet.

The conversion stops at the first equation without an integer form. `explain` lists all of them at once, and it needs no
calibration.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from flax import nnx

from qjax.graph.unsupported import cures_of, problem_of
from qjax.layers import Traced, instrument, module_types, trace
from qjax.model.quantized_model import Plan, QuantizedModel, evaluation_copy, unquantized
from qjax.recipe.recipe import Recipe, WeightFormat
from qjax.support.batches import arguments_of
from qjax.support.tables import table
from qjax.support.transfers import with_transfers
from qjax.tracing import (
    Annotation,
    Composite,
    Equation,
    Lost,
    Program,
    keeps_number,
    lost_tables,
    makes_codes,
    said,
    setting_of_product,
)

Form = Literal["integer", "table", "folded", "moved", "index", "float", "dynamic", "unsupported"]

FORMS: Mapping[Form, str] = {
    "integer": "an integer kernel",
    "table": "a table of codes",
    "folded": "constants of the kernel before it",
    "moved": "codes moved or selected",
    "index": "indices or booleans, which need no scale",
    "float": "float, as the recipe requests",
    "dynamic": "a product of codes with scales found at run time",
    "unsupported": "no integer form",
}
"""What an equation may become."""

_MODES: Mapping[str, Form] = {
    "producer": "integer",
    "start": "integer",
    "chain": "folded",
    "permute": "folded",
    "grid": "moved",
    "integer": "index",
}


@dataclasses.dataclass(frozen=True)
class Explained:
    """One equation, or a group of equations that is recognised as one operation.

    module: its path. primitive: its name in the jaxpr, or of the function that a group computes. operation: its name in
    the graph, or the bits of a product whose scales are found at run time; empty if there is none. shape: of its
    result. equations: how many equations of the jaxpr it covers. location: the user's "file:line". problem, cures: for
    what is unsupported; in a calibrated model also the problem of a table whose input has too few codes.
    """

    module: str
    primitive: str
    operation: str
    form: Form
    shape: tuple[int, ...]
    equations: int
    location: str | None
    problem: str = ""
    cures: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every equation that depends on the model's inputs, in order; `str()` is a table followed by the cures."""

    rows: tuple[Explained, ...]

    @property
    def unsupported(self) -> tuple[Explained, ...]:
        """The equations that prevent an integer graph."""
        return tuple(row for row in self.rows if row.form == "unsupported")

    @property
    def convertible(self) -> bool:
        """Whether the conversion has a form for every equation."""
        return not self.unsupported

    def counts(self) -> dict[Form, int]:
        """How many equations of the jaxpr have each form."""
        found: Counter[Form] = Counter()
        for row in self.rows:
            found[row.form] += row.equations
        return {form: found[form] for form in FORMS if found[form]}

    def __str__(self) -> str:
        header = ("module", "primitive", "becomes", "operation", "shape", "line")
        cells = [
            [row.module or "-", row.primitive, row.form, row.operation, _shape(row.shape), _short(row.location)]
            for row in self.rows
        ]
        counts = self.counts()
        lines = [table(header, cells), "", ", ".join(f"{n} {form} ({FORMS[form]})" for form, n in counts.items())]
        for row in self.rows:
            if not row.problem:
                continue
            lines += ["", row.problem, *(f"  cure {i}: {cure}" for i, cure in enumerate(row.cures, 1))]
        return "\n".join(lines)


@with_transfers
def explain(model: nnx.Module, sample: Any, recipe: Recipe | None = None) -> Explanation:
    """List what each equation of a model becomes in evaluation mode under a recipe.

    Args:
      model: an `nnx.Module`, or a model from `quantize`, which brings its own recipe.
      sample: one batch, as for `quantize`; only its shapes matter.
      recipe: None is `Recipe()`.

    Raises:
      TraceError: the model cannot be traced, because a shape or a Python branch depends on data.

    Examples:
      ```python
      print(qjax.explain(model, x))  # one row per equation, and what stands in the way
      ```
    """
    known = isinstance(model, QuantizedModel)
    if known and recipe is not None:
        raise ValueError("explain: expected no recipe for a quantized model, which brings its own. Leave it out.")
    module = model.model if known else instrument(model)
    traced = trace(evaluation_copy(module), arguments_of(sample, "explain", traced=True), {}, known=False)
    if known:
        plan = model.plan
    else:
        recipe = recipe or Recipe()
        plan = unquantized(recipe, module_types(module, traced.read))
        plan = plan.with_ranges(traced, recipe.integers)
    traced, annotation = plan.read(traced)
    needed = _needed(traced.results)
    lost = lost_tables(annotation, model.qparams().get) if known else {}
    return Explanation(tuple(_rows(traced.results, annotation, plan, needed, lost)))


def obstacles(traced: Traced, annotation: Annotation, plan: Plan) -> str:
    """Everything that `convert` will refuse, with the cures; empty if there is nothing."""
    return "\n".join(" ".join([row.problem, *row.cures]) for row in refused_rows(traced, annotation, plan))


def refused_rows(traced: Traced, annotation: Annotation, plan: Plan) -> tuple[Explained, ...]:
    """The equations that `convert` will refuse."""
    return Explanation(tuple(_rows(traced.results, annotation, plan, _needed(traced.results), {}))).unsupported


def _rows(
    program: Program, annotation: Annotation, plan: Plan, needed: set[Equation], lost: Mapping[Equation, Lost]
) -> Iterator[Explained]:
    for eqn in program.equations:
        if eqn not in needed or all(annotation.is_constant(eqn)) or makes_codes(eqn):
            continue
        if eqn.body is not None:
            yield from _rows(eqn.body, annotation, plan, needed, lost)
            continue
        row = _row(eqn, annotation, plan)
        yield dataclasses.replace(row, problem=said({eqn: lost[eqn]})) if eqn in lost else row


def _row(eqn: Equation, annotation: Annotation, plan: Plan) -> Explained:
    count = len(eqn.source.equations) if isinstance(eqn.source, Composite) else 1
    name, shape = eqn.function or eqn.primitive, eqn.out_shapes[0] if eqn.out_shapes else ()
    reading = annotation.ops.get(eqn)
    if reading is not None:
        op, mode = reading
        form = "table" if op.tabulates else _MODES[mode]
        return Explained(eqn.scope, name, op.name, form, shape, count, eqn.location)
    setting = setting_of_product(eqn)
    if setting is not None:
        # Show the name that the model's own jaxpr uses.
        (product,) = eqn.source.equations
        form = "float" if isinstance(setting, WeightFormat) else "dynamic"
        return Explained(eqn.scope, product.primitive, str(setting), form, shape, count, eqn.location)
    if plan.is_float(eqn.scope) or eqn in annotation.floats:
        return Explained(eqn.scope, name, "", "float", shape, count, eqn.location)
    if keeps_number(eqn):
        form = "moved" if eqn.inputs[0].is_float else "index"
        return Explained(eqn.scope, name, "", form, shape, count, eqn.location)
    problem, cures = problem_of(eqn), cures_of(eqn)
    return Explained(eqn.scope, name, "", "unsupported", shape, count, eqn.location, problem, cures)


def _needed(program: Program) -> set[Equation]:
    """The equations that an output depends on; what a model computes and drops does not prevent a graph."""
    found: set[Equation] = set()
    wanted = set(program.outputs)
    for eqn in reversed(program.equations):
        if not wanted.intersection(eqn.outputs):
            continue
        found.add(eqn)
        wanted.update(eqn.inputs)
        if eqn.body is not None:
            found |= _needed(eqn.body)
    return found


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _short(location: str | None) -> str:
    return os.path.basename(location) if location else "-"
