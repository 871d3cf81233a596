"""Tools for your own studies: predict, measure, draw and write a page; and sweeps that resume and return a table.

Pictures need matplotlib: `pip install "qjax-quant[lab]"`.
"""

from qjax.contrib.lab.pages import page
from qjax.contrib.lab.running import Result, run, write
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, binomial_band, mean_band
from qjax.contrib.lab.sweeping import Rows, SweepError, sweep

__all__ = [
    "Measurement",
    "Prediction",
    "Result",
    "Rows",
    "Settings",
    "Study",
    "SweepError",
    "Table",
    "binomial_band",
    "mean_band",
    "page",
    "run",
    "sweep",
    "write",
]
