"""The parts of `qjax.export.lower`: states of values, and the nodes of equations, loops and quantizers."""
