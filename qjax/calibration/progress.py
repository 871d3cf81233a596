"""A progress bar for calibration, on standard error."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(iterable: Iterable[T], description: str, enabled: bool | None = None) -> Iterator[T]:
    """Yields from `iterable` under a progress bar that shows `description`.

    Args:
        enabled: True draws the bar, False does not, None draws it if standard error is a terminal.
            The total is shown where the iterable has a length.
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield from iterable
        return
    # Imported here because `import qjax` loads no terminal library.
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(iterable, description, console=Console(stderr=True))
