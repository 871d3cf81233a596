"""What a study consists of: predictions with their bands, a measurement, a picture, and conclusions."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a study runs.

    Args:
      seed: the seed of everything that is drawn at random.
      full: whether to use as many samples, sizes and seeds as the study can.

    Examples:
      >>> from qjax.contrib.lab import Settings
      >>> Settings(seed=1, full=True)
      Settings(seed=1, full=True)
    """

    seed: int = 0
    full: bool = False


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted band, stated before anything is measured.

    Args:
      name: what is measured, with its unit.
      low, high: the ends of the band, which belong to it.
      why: the formula or the source, and where the width comes from.

    Examples:
      >>> from qjax.contrib.lab import Prediction
      >>> prediction = Prediction("share", 0.2, 0.3, "one of four remainders is a tie")
      >>> prediction.holds(0.25)
      True
    """

    name: str
    low: float
    high: float
    why: str

    def holds(self, value: float) -> bool:
        """Whether a measured value lies in the band; NaN does not."""
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Table:
    """Figures in rows.

    Args:
      title: the heading on the page.
      columns: their names.
      rows: one cell for each column; numbers are shown to four digits.

    Examples:
      >>> from qjax.contrib.lab import Table
      >>> table = Table("Codes", ("bits", "codes"), [(2, 4), (4, 16)])
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a study measured.

    Args:
      values: one for each prediction, by its name.
      tables: figures for the page.
      data: what the picture draws, JSON values.
      conclusion: what the figures mean, in Markdown. It takes its figures from the measurement; none is typed by hand.

    Examples:
      >>> from qjax.contrib.lab import Measurement
      >>> measurement = Measurement({"share": 0.25}, [], {}, "A quarter of the codes differ.")
    """

    values: Mapping[str, float]
    tables: Sequence[Table]
    data: Mapping[str, Any]
    conclusion: str


@dataclasses.dataclass(frozen=True)
class Study:
    """One question, with the functions that answer it.

    Args:
      name: the name of its files.
      title: the title of its page.
      question, method: Markdown, without measured figures.
      predict: yields the predictions; it sees the settings only.
      measure: does the work.
      draw: fills a matplotlib figure from `Measurement.data`.
      answer: what a practitioner should do, Markdown, at the top of the page.
      command: the command that makes the page, for its readers.

    Examples:
      >>> from qjax.contrib.lab import Measurement, Prediction, Study
      >>> study = Study(
      ...     name="coin",
      ...     title="A coin",
      ...     question="How often do heads come up?",
      ...     method="One throw.",
      ...     predict=lambda settings: [Prediction("heads", 0, 1, "a share")],
      ...     measure=lambda settings: Measurement({"heads": 1.0}, [], {}, "It was heads."),
      ...     draw=lambda figure, data: None,
      ... )
    """

    name: str
    title: str
    question: str
    method: str
    predict: Callable[[Settings], Iterable[Prediction]]
    measure: Callable[[Settings], Measurement]
    draw: Callable[["Figure", Mapping[str, Any]], None]
    answer: str = ""
    command: str = ""


def binomial_band(probability: float, samples: int, sigmas: float = 5.0) -> tuple[float, float]:
    """The band of the share of independent trials that succeed: `p -+ sigmas sqrt(p (1 - p) / n)`.

    Args:
      probability: the probability of one success, p.
      samples: the number of trials, n.
      sigmas: half the width in standard deviations; one run in two million falls outside of a band of 5.

    Examples:
      >>> from qjax.contrib.lab import binomial_band
      >>> low, high = binomial_band(0.5, 10_000)
      >>> round(low, 3), round(high, 3)
      (0.475, 0.525)
    """
    spread = sigmas * (probability * (1 - probability) / samples) ** 0.5
    return probability - spread, probability + spread


def mean_band(mean: float, deviation: float, samples: int, sigmas: float = 5.0) -> tuple[float, float]:
    """The band of the mean of independent numbers: `mean -+ sigmas deviation / sqrt(n)`.

    Args:
      mean, deviation: the expectation and the standard deviation of one number.
      samples: how many numbers there are, n.
      sigmas: half the width in standard errors.

    Examples:
      >>> from qjax.contrib.lab import mean_band
      >>> mean_band(1.0, deviation=2.0, samples=100)
      (0.0, 2.0)
    """
    spread = sigmas * deviation / samples**0.5
    return mean - spread, mean + spread
