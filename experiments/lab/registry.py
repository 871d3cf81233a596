"""The studies by name; each is a module of its own, imported when it is asked for."""

import importlib

from qjax.contrib.lab.study import Study

STUDIES = (
    "ties",
    "double_rounding",
    "depth",
    "network_depth",
    "transfer",
    "network_transfer",
    "trainer_precision",
    "network_precision",
    "accumulators",
    "network_accumulators",
    "stochastic",
    "network_stochastic",
    "oscillations",
    "network_oscillations",
    "learned_rounding",
    "network_learned_rounding",
    "pooling",
    "network_pooling",
)
"""In the order in which they are best read."""


def get(name: str) -> Study:
    """The study of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in STUDIES:
        raise ValueError(f"expected a study, one of {', '.join(STUDIES)}; got {name!r}.")
    return importlib.import_module(f"experiments.lab.{name}").STUDY
