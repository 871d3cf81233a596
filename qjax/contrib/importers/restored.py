"""Checks, for files that qjax wrote, that the graph in their metadata describes the file.

The graph is written again, and the result must be the same file. A file that another tool changed fails this check, and
so does a forged one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from qjax.export.read_errors import ReadError
from qjax.graph.ir import Graph

OPERATORS = "Read it with metadata=False, which reads its operators alone, under the names that they have in the file."
"""The cure for files whose operators can be read without the metadata."""


def restored(make: Callable[[], Graph], difference: Callable[[Graph], str], cure: str = OPERATORS) -> Graph:
    """The graph that was written.

    Args:
      make: returns the graph of the metadata. difference: writes a graph again and returns how it differs from the
        file, or "" if it does not.

    Raises:
      ReadError: the metadata is damaged, or does not describe the file.
      ModuleNotFoundError: a package is missing with which the graph is written again.
    """
    try:
        graph = make()
        different = difference(graph)
    except (ReadError, ModuleNotFoundError):
        raise
    except Exception as error:
        # A forged document may fail anywhere.
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReadError(f"the graph in the file's metadata is damaged ({reason}). {cure}") from error
    if different:
        raise ReadError(
            f"the graph in the file's metadata does not describe the file ({different}): something changed the file "
            f"since qjax wrote it, or another version wrote it. {cure}"
        )
    return graph


def check_version(document: Mapping[str, Any], expected: int, cure: str = "") -> None:
    """Raise a ReadError for a document of another version. cure: a cure besides writing the file again."""
    version = document.get("version")
    if type(version) is not int or version != expected:
        raise ReadError(
            f"expected qjax's metadata of version {expected}, got version {version!r}. Write the file again with this "
            f"version of qjax. {cure}".rstrip()
        )
