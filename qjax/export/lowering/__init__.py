"""The parts of `qjax.export.lower`: what values are on their way, and the nodes of equations, loops and quantizers."""
