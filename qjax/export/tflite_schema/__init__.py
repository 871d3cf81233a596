"""The format of a .tflite file, for everything that writes or reads one: operators, versions, layouts, the file.

`operators` defines which builtin operators qjax's operations become and which version each needs, `layouts` the layout
of kernels in the file, `file` puts tensors and operators into a flatbuffer. TensorFlow is not needed; the schema's
bindings are those of the package ai-edge-litert, imported when a file is written.
"""
