"""Timings, on the public interface of qjax and on its kernels."""
