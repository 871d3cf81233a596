"""Accuracy of float, post-training and trained quantization on real networks: `python -m experiments.accuracy`."""
