"""Runs a graph: as one compiled function, with its loops as loops, or node by node."""
