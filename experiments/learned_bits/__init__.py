"""Accuracy against logic where training learns the bits of every weight, beside HGQ2."""
