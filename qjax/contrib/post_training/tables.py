"""Gives every row of an embedding table its own scale.

A single scale for a whole table must cover its greatest number, so large numbers in the rows of rare words determine
the resolution of common ones. With a scale per row, each row uses all codes. The looked-up rows get a separate
quantizer, which covers the rows that the data ask for; one rounding in integers converts between them
(`qjax.ops.embed_rows`).
"""

import dataclasses
import re

from flax import nnx

from qjax import ops
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.recipe.recipe import Override, Recipe


def tables_of(qmodel: QuantizedModel) -> list[str]:
    """The quantizers of embedding tables that have one scale and could have one per row."""
    # A table that represents a function of integers is not a parameter.
    parameters = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(qmodel.model))}
    found: list[str] = []
    for name, (kind, _, op, shape) in qmodel.plan.details:
        one = kind == "weight" and name in parameters and qmodel.plan.by_name[name].spec.per_tensor
        if one and len(shape) == 2 and op in ops.names() and ops.get(op).by_row is not None:
            found.append(name)
    return found


def row_scales(qmodel: QuantizedModel, recipe: Recipe) -> Recipe:
    """Return a recipe with which `quantize` gives every embedding table of a model a scale per row.

    Args:
      qmodel: a model made by `recipe`; it is not changed.
      recipe: the recipe that made it.

    Raises:
      ValueError: there is no table with one scale.

    Examples:
      ```python
      class Tagger(nnx.Module):
          def __init__(self, rngs):
              self.table, self.head = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

          def __call__(self, tokens):
              return self.head(self.table(tokens))


      tagger, tokens = Tagger(nnx.Rngs(0)), jnp.arange(16).reshape(2, 8)
      recipe = qjax.Recipe(integers=[qjax.integers("tokens", 0, 15)])
      recipe = qjax.training.row_scales(qjax.quantize(tagger, recipe, tokens), recipe)
      ```
    """
    check_quantized(qmodel, "row_scales")
    names = tables_of(qmodel)
    if not names:
        raise ValueError("row_scales: expected an embedding table with one scale, got a model without one.")
    specs = {re.escape(name): qmodel.plan.by_name[name].spec.replace(axis=0) for name in names}
    kept = {key: value for key, value in recipe.overrides.items() if key not in specs}
    overrides = {**kept, **{key: Override(weights=spec) for key, spec in specs.items()}}
    return dataclasses.replace(recipe, overrides=overrides)
