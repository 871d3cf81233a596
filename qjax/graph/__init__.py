"""The graph: its types, its rules, and what is asked of its nodes."""
