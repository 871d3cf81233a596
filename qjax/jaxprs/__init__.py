"""Tools for JAX's own programs (jaxprs), independent of what qjax makes of them.

`evaluator` computes a jaxpr in NumPy without compiling it; `rules` defines what each primitive computes.
"""
