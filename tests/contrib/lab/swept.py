"""Functions that other processes import."""

import os


def area(width: int, height: int) -> dict[str, int]:
    return {"area": width * height}


def dies(width: int, height: int) -> dict[str, int]:
    """Ends its process, as a kill does, at one point; `QJAX_TEST_LIVES` lets it pass."""
    if (width, height) == (2, 10) and "QJAX_TEST_LIVES" not in os.environ:
        os._exit(9)
    return {"area": width * height}
