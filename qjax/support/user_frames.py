"""Finds the user's line that called into the package, for warnings."""

import sys


def users_level() -> int:
    """The `stacklevel` at which a warning shows the user's line, however deep in the package the caller is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "qjax":
        frame, level = frame.f_back, level + 1
    return level
