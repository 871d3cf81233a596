"""The quantized model as an `nnx.Module`: its plan, the numbers of its quantizers, and one call of it.

`quantized_model` has the plan and the module, `quantizer_numbers` its learned and observed numbers as packed variables,
`call` a traced call that can be run in other ways, `compiled_call` the call outside of `jit`. `summary` is the table of
the quantizers. `fingerprint` refuses the state of another plan, `finite` finds parameters that are NaN or infinite.
"""
