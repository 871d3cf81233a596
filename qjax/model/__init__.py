"""The quantized model, an `nnx.Module`: its plan, the numbers of its quantizers, and one call of it.

`quantized_model` holds the plan and the module, `quantizer_numbers` the learned and observed numbers in packed
variables, `call` a traced call that can be run in other ways, and `compiled_call` a call outside of `jit`. `summary`
prints the quantizers as a table. `fingerprint` refuses a state that belongs to another plan, and `finite` refuses
parameters that are NaN or infinite.
"""
