"""Compares a graph with a model or with another graph, node by node, and explains the differences."""
