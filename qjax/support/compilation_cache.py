"""Compiled programs kept on disk, so that the next process starts with them."""

import os
from pathlib import Path

import jax


def cache_compilations(folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep what XLA compiles in a folder, and take it from there in the next process. Call it first, once.

    It sets three options of JAX (`jax_compilation_cache_dir`, and the least time and size to 0, because a quantized
    model also compiles many small programs). JAX's cache holds every program, of qjax or not, under a hash of its text,
    the versions and the machine; a change of any of them compiles anew. The bits are the same: what is kept is the
    compiled program.

    Tracing and lowering are not kept.

    Args:
      folder: where; None is `qjax` in `$XDG_CACHE_HOME`, or in `~/.cache`. It grows until you delete it.

    Returns:
      The folder.

    Raises:
      OSError: the folder cannot be made.

    Examples:
      ```python
      qjax.cache_compilations()  # once, before the first call; returns the folder
      ```
    """
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qjax"
    path = Path(folder).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cache_compilations: expected a folder, or a path where one can be made, got {str(path)!r}: {error}. Give "
            "another one."
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
