"""Quantized .tflite files of public repositories, read and compared with their runtimes."""
