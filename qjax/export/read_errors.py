"""What a reader raises for a file that it cannot turn into a graph."""

import contextlib
from collections.abc import Generator

import numpy as np

from qjax.graph.check import GraphError
from qjax.lower import ConversionError


class ReadError(ValueError):
    """A file that is damaged, or contains what qjax has no integers for; the message lists it with its cure."""


@contextlib.contextmanager
def reading(
    what: str, *expected: type[Exception], clear: type[Exception] = ConversionError
) -> Generator[None, None, None]:
    """Turn any exception inside into a ReadError that names what was being read.

    A file may break an assumption that no check states. Its user then learns which part of the file that was, and the
    cause stays chained for the developer of the reader.

    Args:
      what: the part of the file.
      expected: exceptions that the caller handles itself.
      clear: exceptions whose messages are clear enough for a user.
    """
    try:
        yield
    except (ReadError, ModuleNotFoundError, *expected):
        raise
    except (GraphError, clear) as error:
        raise ReadError(str(error)) from error
    except Exception as error:
        raise ReadError(
            f"{what}: qjax expected something else here and stopped ({type(error).__name__}: {str(error)[:200]}). The "
            "file is damaged, or qjax's reader lacks a check: run the file in its own runtime to find out which, and "
            "report it if it runs."
        ) from error


def usable(scale: np.ndarray) -> bool:
    """Whether scales are positive, finite and normal float32 numbers; processors treat subnormal ones as zero."""
    return bool(np.isfinite(scale).all() and (scale >= np.finfo(np.float32).tiny).all())


SCALES = "expected scales that are finite and positive, and at least 1.2e-38"
