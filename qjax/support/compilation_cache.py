"""Stores compiled programs on disk, so that the next process need not compile them."""

import os
from pathlib import Path

import jax


def cache_compilations(folder: str | os.PathLike[str] | None = None) -> Path:
    """Store what XLA compiles in a folder, from which the next process loads it. Call it first, and once.

    It sets three options of JAX (`jax_compilation_cache_dir`, and the least time and size to 0, because a quantized
    model also compiles many small programs). JAX's cache stores every program, of qjax or not, under a hash of its
    text, the versions and the machine, so a change in any of them compiles again. The bits are the same, because the
    cache stores the compiled program itself.

    Tracing and lowering are not cached.

    Args:
      folder: the place of the cache; None is `qjax` in `$XDG_CACHE_HOME`, or in `~/.cache`. It grows until you delete
        it.

    Returns:
      The folder.

    Raises:
      OSError: the folder cannot be created.

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
