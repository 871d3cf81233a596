"""`python -m qjax.targets` prints the matrix of `qjax.conformance`.

By name, not by import: the targets lie below everything that proves them.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("qjax.conformance", run_name="__main__", alter_sys=True)
