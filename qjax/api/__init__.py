"""The steps from a float model to a verified integer graph: `quantize`, `calibrate`, `convert`, `exact`, `verify`.

`workflow` holds `quantize`, `convert` and `verify`; `calibrate`, `exact` and `explain` have files of their own.
`convert` builds the graph that `qjax.convert` returns, and `recipe_fit` finds the settings of a recipe that have no
effect on a model.
"""
