"""Observers and estimators: how scales and zero points follow from data, and how training learns them."""

from qjax.calibration.callback import Callback
from qjax.calibration.entropy import Entropy
from qjax.calibration.estimators import LSQ, PACT, TQT, Estimator, LSQPlus, estimator, estimators
from qjax.calibration.minmax import MinMax
from qjax.calibration.moving_average import MovingAverage
from qjax.calibration.mse import MSE
from qjax.calibration.observer import Observer
from qjax.calibration.percentile import Percentile
from qjax.calibration.registry import get, names
from qjax.calibration.weights import weight_qparams
from qjax.support.progress import track

__all__ = [
    "LSQ",
    "MSE",
    "PACT",
    "TQT",
    "Callback",
    "Entropy",
    "Estimator",
    "LSQPlus",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "estimator",
    "estimators",
    "get",
    "names",
    "track",
    "weight_qparams",
]
