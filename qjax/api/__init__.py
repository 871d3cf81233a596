"""The steps from a float model to a checked integer graph.

`workflow` has `quantize`, `convert` and `verify`; `calibrate`, `exact` and `explain` have files of their own. `convert`
makes the graph that `qjax.convert` returns, and `recipe_fit` finds what of a recipe has no effect on a model.
"""
