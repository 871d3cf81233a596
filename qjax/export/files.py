"""Files on the disk: read as a whole with a size limit, written all or nothing."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Generator, Mapping, Sequence

StrPath = str | os.PathLike[str]

_CURES = {
    errno.ENOSPC: "Free space there, or choose another folder",
    errno.EDQUOT: "Free space there, or choose another folder",
    errno.EACCES: "Choose a folder that you may write to",
    errno.EPERM: "Choose a folder that you may write to",
    errno.EROFS: "Choose a folder that you may write to",
}


class WriteError(OSError):
    """A file could not be written; the message names the caller's path, and the cause is the system's error."""


def read(path: StrPath, max_bytes: int, what: str, error: type[ValueError] = ValueError) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; what: its kind, for messages.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError (or `error`): a folder, a pipe, or a file that is too large.
    """
    path = os.fspath(path)
    # Check the kind of file before opening it, because opening a pipe would wait forever.
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
    """Write a file, all or nothing: `write_all` of one."""
    write_all({os.fspath(path): data}, error)


def write_all(contents: Mapping[str, bytes], error: type[ValueError] = ValueError) -> None:
    """Write several files that belong together, by path: all of them or none.

    The bytes go to temporary files in the same folders and reach the disk. Only then are these renamed, each in one
    step. If one of them fails, those before it get their old contents back, so that whatever fails, a file that existed
    is intact and no new file stays beside an old one. A new file gets the usual permissions, a replaced one keeps its
    own, and a symbolic link is followed.

    Temporary files that a killed process left in the folders are removed first; their names identify them.

    Raises:
      ValueError (or `error`): a path is a folder or a device.
      FileNotFoundError: a folder is missing. WriteError: it is not writable, or the disk is full.
    """
    with _name_paths(*contents):
        _write_all(contents, error)


def write_folder(folder: StrPath, contents: Mapping[str, bytes], endings: Sequence[str] = ()) -> None:
    """Write files by name into a folder, which is created if necessary: all of them or none.

    Args:
      endings: of the files in the folder; a new folder with such an ending was meant to be a file.

    Raises:
      ValueError: the name has such an ending, or is that of a file. OSError: as `write_all`.
    """
    folder = os.fspath(folder)
    root, ending = os.path.splitext(folder)
    if not os.path.isdir(folder) and (os.path.exists(folder) or ending in endings):
        what = "the name of a file" if ending in endings else "a file"
        raise ValueError(
            f"{folder}: expected a folder for {', '.join(sorted(contents))}, got {what}. Give a folder, such as "
            f"{(root if ending else f'{folder}_files')!r}; name=... is what the files in it are called."
        )
    with _name_paths(folder):
        for part in sorted({os.path.dirname(file) for file in contents}):
            os.makedirs(os.path.join(folder, part), exist_ok=True)
    with _name_paths(folder):
        _write_all({os.path.join(folder, file): data for file, data in contents.items()}, ValueError)


@contextlib.contextmanager
def _name_paths(*paths: str) -> Generator[None]:
    """A context in which system errors that name a temporary file, or none, become errors that name the paths."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError) or error.errno is None:
            raise
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno, "Choose another place")
        raise WriteError(
            error.errno, f"{', '.join(paths)}: could not be written: {reason}. {cure}; what was there is unchanged."
        ) from error


def _write_all(contents: Mapping[str, bytes], error: type[ValueError]) -> None:
    paths = [os.path.realpath(path) for path in contents]
    modes = [_mode_at(path, error) for path in paths]
    folders = dict.fromkeys(os.path.dirname(path) for path in paths)
    for folder in folders:
        _remove_leftovers(folder)
    with contextlib.ExitStack() as undo:
        temporaries: list[str] = []
        for path, mode, data in zip(paths, modes, contents.values(), strict=True):
            temporaries.append(_temporary(path, undo))
            _write_new(temporaries[-1], data, mode)
        with contextlib.ExitStack() as back:
            # A single file needs no rollback, because only its last step can fail.
            if len(paths) > 1:
                for path, mode in zip(paths, modes, strict=True):
                    back.callback(_restore, path, None if mode is None else _backup(path, undo))
            for temporary, path in zip(temporaries, paths, strict=True):
                os.replace(temporary, path)
            back.pop_all()
    if os.name == "posix":
        for folder in folders:
            _sync_folder(folder)


def _mode_at(path: str, error: type[ValueError]) -> int | None:
    """The permissions of the file at a path; None if there is none yet."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path}: expected a folder {folder!r}, got none: create it first.")
    if not os.path.exists(path):
        return None
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise error(f"{path}: expected the name of a file, got {_what(mode)}: choose another name.")
    return stat.S_IMODE(mode) & 0o777


def _temporary(path: str, undo: contextlib.ExitStack) -> str:
    """A new name beside a path that identifies its process; the file is removed when `undo` closes."""
    name = f".qjax-{_machine()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    temporary = os.path.join(os.path.dirname(path), name)
    undo.callback(_remove, temporary)
    return temporary


def _write_new(path: str, data: bytes, mode: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666 if mode is None else mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if mode is not None:
        os.chmod(path, mode)


def _backup(path: str, undo: contextlib.ExitStack) -> str:
    """A second name of the file at a path, or a copy if the file system has no hard links."""
    backup = _temporary(path, undo)
    try:
        os.link(path, backup)
    except OSError:
        shutil.copy2(path, backup)
    return backup


def _restore(path: str, backup: str | None) -> None:
    """Put a file back; None: there was none."""
    if backup is None:
        _remove(path)
    else:
        os.replace(backup, path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    # The new name survives a power cut only once its folder is on the disk. Some network file systems cannot sync a
    # folder; the file is complete even then.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _machine() -> str:
    """Eight digits that identify what numbers the processes: the host, and on Linux the container."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(f'{socket.gethostname()} {namespace}'.encode()):08x}"


_TEMPORARY = re.compile(r"\.qjax-([0-9a-f]{8})-([0-9]+)-[0-9a-f]{16}\.tmp")


def _remove_leftovers(folder: str) -> None:
    """Remove temporary files of this machine's processes that no longer run. Those that cannot be removed stay."""
    if os.name != "posix":
        # On other systems os.kill would end the process.
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            found = _TEMPORARY.fullmatch(name)
            if found is not None and found[1] == _machine() and not _runs(int(found[2])):
                _remove(os.path.join(folder, name))


def _runs(process: int) -> bool:
    """Whether a process exists; True if that cannot be determined."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _what(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
