"""Models that others wrote, unchanged, all the way to integers: see `python -m experiments.public --help`."""
