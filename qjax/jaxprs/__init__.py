"""What qjax knows of JAX's own programs (jaxprs), apart from what it makes of them.

`evaluator` computes a jaxpr in numpy, without compiling it; `rules` holds what each primitive computes.
"""
