"""Shows progress of calls that take longer than two seconds: one line on stderr, which disappears when the call ends.

By default the line is shown on a terminal only (not in logs and pipes). `progress=True` or `False` decides for one
call; `qjax.show_progress(True)`, `(False)` or QJAX_PROGRESS=1, 0 for all calls without `progress=`.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0
"""Seconds before a line is shown, because faster calls need none."""
_TICK = 0.5

_chosen: bool | None = {"1": True, "0": False}.get(os.environ.get("QJAX_PROGRESS", ""))


def show_progress(enabled: bool | None) -> None:
    """Show progress lines always, never, or (None) only on a terminal. Calls with `progress=` decide for themselves.

    Args:
      enabled: True shows lines everywhere, False nowhere, None on a terminal only.

    Examples:
      ```python
      qjax.show_progress(False)  # no lines in this process, whatever the terminal
      qjax.show_progress(None)  # the default: lines on a terminal only
      ```
    """
    global _chosen
    if enabled is not None and not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"show_progress: expected True, False or None, got {enabled!r}.")
    _chosen = enabled


def shown(enabled: bool | None) -> bool:
    """Whether a call whose `progress=` is `enabled` shows a line."""
    wanted = _chosen if enabled is None else enabled
    return sys.stderr.isatty() if wanted is None else wanted


class _Line:
    """The single line: the stages that run now, innermost last. A thread redraws it while something runs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: list[_Step] = []
        self.drawn = False
        self.alive = False

    def enter(self, step: "_Step") -> None:
        with self.lock:
            self.running.append(step)
            if not self.alive:
                self.alive = True
                threading.Thread(target=self._draw_on, name="qjax progress", daemon=True).start()

    def leave(self, step: "_Step") -> None:
        with self.lock:
            self.running.remove(step)
            if not self.running:
                self.clear()

    def _draw_on(self) -> None:
        while True:
            time.sleep(_TICK)
            with self.lock:
                if not self.running:
                    self.alive = False
                    return
                if time.monotonic() - self.running[0].start >= DELAY:
                    self.draw()

    def draw(self) -> None:
        """Write the line again; the lock must be held."""
        text = " > ".join(str(step) for step in self.running)
        seconds = f", {time.monotonic() - self.running[0].start:.0f} s"
        # A line that wraps could not be erased.
        room = shutil.get_terminal_size((150, 24)).columns - len(seconds) - 1
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[2K{f'qjax: {text}'[:room]}{seconds}")
            sys.stderr.flush()
            self.drawn = True

    def clear(self) -> None:
        """Erase the line; the lock must be held."""
        if self.drawn:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
            self.drawn = False


class _Step:
    """One stage that runs.

    done: the number of the current item, from 1. total: the number of items, if known. compiles: whether the first
    item takes longest because XLA compiles what the others reuse.
    """

    def __init__(self, text: str, total: int | None = None, compiles: bool = False) -> None:
        self.text, self.total, self.compiles = text, total, compiles
        self.done = 0
        self.start = time.monotonic()

    def __str__(self) -> str:
        if not self.done:
            return self.text
        items = f"{self.text} {self.done}" if self.total is None else f"{self.text} {self.done} of {self.total}"
        return f"{items} (compiling)" if self.compiles and self.done == 1 else items


_line = _Line()


def say(text: str) -> None:
    """Print to standard output, after erasing a progress line."""
    with _line.lock:
        _line.clear()
        print(text, flush=True)


@contextlib.contextmanager
def stage(text: str, enabled: bool | None = None) -> Iterator[None]:
    """A context in which a line shows `text` and the seconds, once two have passed."""
    if not shown(enabled):
        yield
        return
    step = _Step(text)
    _line.enter(step)
    try:
        yield
    finally:
        _line.leave(step)


def track(
    iterable: Iterable[T], description: str, enabled: bool | None = None, *, compiles: bool = False
) -> Iterator[T]:
    """Yield from `iterable` under a line that counts the items; one item is taken at a time.

    Args:
      iterable: the items to count.
      description: the text before the count.
      enabled: True shows the line at once, False never, None after two seconds if `shown` allows it. The total is shown
        if the iterable has a length.
      compiles: whether the line says "(compiling)" during the first item, because the others reuse what it compiles.

    Examples:
      >>> from qjax import calibration
      >>> sum(calibration.track([1, 2, 3], "epoch"))
      6
    """
    if not shown(enabled):
        yield from iterable
        return
    try:
        total = len(iterable)  # pyright: ignore[reportArgumentType]
    except TypeError:
        hint = getattr(iterable, "__length_hint__", None)
        found = hint() if callable(hint) else 0
        total = found if isinstance(found, int) and found > 0 else None
    step = _Step(description, total, compiles)
    _line.enter(step)
    try:
        for item in iterable:
            step.done += 1
            if enabled:
                with _line.lock:
                    _line.draw()
            yield item
    finally:
        _line.leave(step)
