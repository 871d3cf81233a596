"""Files on the disk: read whole and bounded, written all or nothing."""

import contextlib
import os
import secrets
import stat

StrPath = str | os.PathLike[str]


def read(path: StrPath, max_bytes: int, what: str, error: type[ValueError] = ValueError) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; what: its kind, for messages.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError (or `error`): a folder, a pipe, or a file that is too large.
    """
    path = os.fspath(path)
    # Looked at before it is opened: opening a pipe would wait for ever.
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: expected {what}, got no file: check the path.") from None
    if not stat.S_ISREG(mode):
        raise error(f"expected a file, got {_what(mode)}: give the path of the file itself.")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(
                f"expected at most {max_bytes} bytes, got {size}: "
                f"if you trust this file, load it with max_bytes={size}."
            )
        return file.read(size)


def write(data: bytes, path: StrPath, error: type[ValueError] = ValueError) -> None:
    """Write a file, all or nothing.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the name in one step: whatever
    fails, a file that stood there before is whole. A new file gets the usual permissions, a replaced one keeps its
    own; a symbolic link is followed.

    Raises:
      ValueError (or `error`): `path` is a folder or a device.
      OSError: the folder is missing, not writable or full.
    """
    path = os.path.realpath(os.fspath(path))
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path}: expected a folder {folder!r}, got none: create it first.")
    mode = None
    if os.path.exists(path):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise error(f"{path}: expected the name of a file, got {_what(mode)}: choose another name.")
        mode = stat.S_IMODE(mode) & 0o777
    temporary = os.path.join(folder, f".qjax-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if os.name == "posix":
        # The new name survives a power cut only once its folder is on the disk. Some network file systems
        # cannot do that: the file is complete all the same.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _what(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
