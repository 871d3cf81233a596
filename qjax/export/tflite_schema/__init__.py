"""What a .tflite file is made of, for everything that writes or reads one: operators, versions, layouts, the file.

`operators` says which builtin operators qjax's operations become and which version each needs, `layouts` how kernels
lie in the file, `file` puts tensors and operators into a flatbuffer. TensorFlow takes no part; the schema's bindings
are those of the package ai-edge-litert, imported when a file is written.
"""
