"""Proves that a target computes what its runtime computes."""
