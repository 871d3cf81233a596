"""The integer graph: its types, its rules, and queries about its nodes."""
