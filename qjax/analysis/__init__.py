"""Measures what each part of a model costs: sensitivity per layer, bits per layer in a budget, tensor statistics."""

from qjax.analysis.effect import Effect
from qjax.analysis.search import Budget, Candidate, LayerChoice, Point, SearchResult, search
from qjax.analysis.sensitivity import Sensitivity, SensitivityRow, sensitivity
from qjax.analysis.statistics import Statistics, TensorStatistics, statistics
from qjax.analysis.switched import SwitchedModel

__all__ = [
    "Budget",
    "Candidate",
    "Effect",
    "LayerChoice",
    "Point",
    "SearchResult",
    "Sensitivity",
    "SensitivityRow",
    "Statistics",
    "SwitchedModel",
    "TensorStatistics",
    "search",
    "sensitivity",
    "statistics",
]
