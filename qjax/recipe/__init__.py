"""The recipe: which tensors get how many bits, and how their scales are found and learned.

`recipe` holds the recipe itself, `override` the exceptions for some tensors, and `keys` how an override selects them.
"""
