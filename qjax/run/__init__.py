"""Runs a graph: whole and compiled, with its loops as loops, or node by node."""
