"""Looks up observers by name."""

from collections.abc import Callable

from qjax.calibration.entropy import Entropy
from qjax.calibration.minmax import MinMax
from qjax.calibration.moving_average import MovingAverage
from qjax.calibration.mse import MSE
from qjax.calibration.observer import Observer
from qjax.calibration.percentile import Percentile
from qjax.support.names import did_you_mean

_OBSERVERS: dict[str, Callable[[], Observer]] = {
    cls.name: cls for cls in (MinMax, MovingAverage, Percentile, MSE, Entropy)
}


def names() -> tuple[str, ...]:
    """The names that `get` knows.

    Examples:
      >>> from qjax import calibration
      >>> "percentile" in calibration.names()
      True
    """
    return tuple(_OBSERVERS)


def get(observer: str | Observer) -> Observer:
    """The observer with that name and its default settings; an observer is returned unchanged.

    Args:
      observer: a name from `names()`, or an `Observer`.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
        TypeError: `observer` is neither a name nor an observer.

    Examples:
      >>> from qjax import calibration
      >>> calibration.get("minmax")
      MinMax()
    """
    if isinstance(observer, str):
        if observer not in _OBSERVERS:
            raise ValueError(
                f"unknown observer {observer!r}.{did_you_mean(observer, _OBSERVERS)} "
                f"Expected one of {', '.join(map(repr, _OBSERVERS))}, "
                "or an observer such as qjax.calibration.Percentile(99.9)."
            )
        return _OBSERVERS[observer]()
    if isinstance(observer, type) or not isinstance(observer, Observer):
        raise TypeError(
            "expected an observer's name or an object with name, init, update and qparams, "
            f"got {observer!r}" + (": make an instance of it." if isinstance(observer, type) else ".")
        )
    return observer
