"""What the user asks for: bits, methods and settings, and for which tensors.

`recipe` is the whole, `override` what differs for some tensors, `keys` how an override names them.
"""
