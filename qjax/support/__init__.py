"""Helpers that are not about quantization: errors, names, batches of data, progress, caches.

This package imports no other part of qjax.
"""
