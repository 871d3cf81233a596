"""Keras models in qjax: `qjax.from_keras` wraps one as an nnx module, and `qjax.to_keras` trains it as Keras does.

`module` holds the wrapper; `calls` and `layers` follow the layers while it runs; `fit` and `trainer` hold the
`keras.Model` that trains; `trainer` also stores its quantizers in Keras's files.
"""
