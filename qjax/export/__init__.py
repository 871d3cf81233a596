"""From the annotated program to a graph of integers, and out."""
