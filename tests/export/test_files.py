"""Files are written all or nothing, several together as well, and what a killed process left is removed."""

import ast
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest

import qjax
from conformance import golden
from qjax.analysis import picture
from qjax.assign.retarget import retarget
from qjax.cli import arrays
from qjax.contrib import executorch as pte
from qjax.contrib import lab, rtl
from qjax.export import artifact, emit, files
from qjax.export.integer_graph import IntegerGraph
from tests.contrib import gguf_models
from tests.export.emit import nodes
from tests.lower.lowered import dense_chain

ROOT = pathlib.Path(qjax.__file__).parent.parent
FOLDERS = ("qjax", "conformance")
GRAPH = nodes.finished(dense_chain(), "onnxruntime")
OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new a", "b": b"new b"}


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def paths(folder: pathlib.Path, named: dict[str, bytes]) -> dict[str, bytes]:
    return {str(folder / name): data for name, data in named.items()}


def failing(monkeypatch, call: str, at: int) -> None:
    """From its call number `at` on, the function says that the disk is full; once."""
    real, calls = getattr(os, call), [0]

    def called(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, called)


@pytest.mark.parametrize("before", [{}, {"a": OLD["a"]}, {"b": OLD["b"]}, OLD], ids=["none", "a", "b", "both"])
@pytest.mark.parametrize(("call", "at"), [("open", 1), ("open", 2), ("fsync", 2), ("replace", 1), ("replace", 2)])
def test_two_files_are_written_or_neither(tmp_path, monkeypatch, before, call, at):
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    failing(monkeypatch, call, at)
    with pytest.raises(OSError, match="No space left"):
        files.write_all(paths(tmp_path, NEW))
    assert contents(tmp_path) == before


def test_without_hard_links(tmp_path, monkeypatch):
    """Some file systems have none: the old contents are copied."""
    files.write_all(paths(tmp_path, OLD))
    failing(monkeypatch, "link", 1)
    failing(monkeypatch, "replace", 2)
    with pytest.raises(OSError, match="No space left"):
        files.write_all(paths(tmp_path, NEW))
    assert contents(tmp_path) == OLD


def test_files_that_are_replaced_together_keep_their_permissions(tmp_path):
    files.write_all(paths(tmp_path, OLD))
    (tmp_path / "a").chmod(0o600)
    files.write_all(paths(tmp_path, NEW))
    assert contents(tmp_path) == NEW
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


KILLED = """
import os, signal, sys
from qjax.export import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write(b"new", sys.argv[1])
"""


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory) -> pathlib.Path:
    """The folder in which a process was killed while it wrote."""
    folder = tmp_path_factory.mktemp("killed")
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(folder / "m")], check=False)
    assert ended.returncode == -signal.SIGKILL
    return folder


@pytest.mark.exhaustive
def test_what_a_killed_process_left_is_removed_at_the_next_save(tmp_path, left_behind):
    path = tmp_path / "m"
    shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    left = [entry.name for entry in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".qjax-")
    files.write(b"new", path)
    assert contents(tmp_path) == {"m": b"new"}


def test_only_dead_processes_of_this_machine_lose_their_files(tmp_path, left_behind):
    shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    (dead,) = (entry.name for entry in tmp_path.iterdir())
    machine, process, token = dead.removeprefix(".qjax-").removesuffix(".tmp").split("-")
    other = f"{int(machine, 16) ^ 1:08x}"
    kept = {
        f".qjax-{machine}-{os.getpid()}-{token}.tmp",
        f".qjax-{machine}-1-{token}.tmp",
        f".qjax-{other}-{process}-{token}.tmp",
        f".qjax-{machine}-{process}-{token}",
        f"qjax-{machine}-{process}-{token}.tmp",
        f".qjax-{token}.tmp",
    }
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    files.write(b"new", tmp_path / "m")
    assert set(contents(tmp_path)) == {*kept, "m"}


def recorded(folder: pathlib.Path) -> None:
    golden.save("some", golden.Recording("1", {}))


FINISHED = lab.Result(
    lab.Study("m", "", "", "", lambda settings: (), lambda settings: NOTHING, lambda figure, data: None),
    lab.Settings(),
    (),
    NOTHING := lab.Measurement({}, (), {}, ""),
    0.0,
)
ROWS = lab.Rows([{"bits": 8}], ["bits"])


def program(folder: pathlib.Path) -> None:
    """What ExecuTorch makes of the graph is not here: it is a package of its own."""
    with mock.patch.object(pte, "to_bytes", return_value=b"program"):
        emit.emit(GRAPH, "pte", folder / "m.pte")


def circuit(folder: pathlib.Path) -> None:
    """What alkaid makes of the graph is not here: it has no wheels for some machines."""
    logic = types.SimpleNamespace(ops=(), cost=0.0)
    with mock.patch.object(rtl, "build", return_value=(types.SimpleNamespace(logic=logic), {"m.v": b"a", "n.v": b"b"})):
        emit.emit(GRAPH, "rtl", folder)


def language_model(folder: pathlib.Path) -> None:
    """The file that it resembles lies elsewhere, so that only the new one is in the folder."""
    like = folder.parent / "like.gguf"
    if not like.exists():
        gguf_models.write_file(like)
    qjax.gguf.write(gguf_models.Net(), folder / "m.gguf", gguf_models.names, like=like)


WRITERS = {
    "artifact": lambda folder: artifact.save(GRAPH, folder / "m.qjax"),
    "c": lambda folder: emit.emit(GRAPH, "c", folder, name="m"),
    "onnx": lambda folder: emit.emit(GRAPH, "onnx", folder / "m.onnx", codes=True),
    "pte": program,
    "rtl": circuit,
    "stablehlo": lambda folder: emit.emit(GRAPH, "stablehlo", folder / "m.stablehlo"),
    "tflite": lambda folder: emit.emit(retarget(GRAPH, "tflite_micro"), "tflite", folder / "m.tflite"),
    "arrays": lambda folder: arrays.write(str(folder / "m.npz"), {"x": np.zeros(1)}),
    "picture": lambda folder: picture.draw(folder / "m.svg", (1, 1), lambda figure: None),
    "recording": recorded,
    "report": lambda folder: qjax.report(IntegerGraph(GRAPH), path=folder / "m.html"),
    "study": lambda folder: lab.write(FINISHED, folder),
    "sweep": lambda folder: ROWS.csv(folder / "m.csv"),
    "language model": language_model,
    "node data": lambda folder: qjax.node_data(IntegerGraph(GRAPH), folder=folder),
}


FORBIDDEN = ("os.replace", "os.rename", "os.link", "os.fdopen", "np.save", "np.savetxt")
"""And what begins or ends with one of these; numpy's savez and matplotlib's savefig write into memory too."""
BEGINNINGS = ("shutil.copy", "shutil.move", "tempfile.mks", "tempfile.Named")
ENDS = (".write_text", ".write_bytes", ".tofile", "json.dump", "save_file")


def dotted(function: ast.expr) -> str:
    """The names of what is called; a value that has none, such as the result of a call, is empty."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def writes(call: ast.Call) -> bool:
    """Whether a call makes a file by itself; os.open alone makes none of O_WRONLY to a device."""
    name = dotted(call.func)
    modes = [a.value for a in (*call.args[1:2], *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    opened = name in ("open", "io.open") and any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes)
    return opened or name in FORBIDDEN or name.startswith(BEGINNINGS) or name.endswith(ENDS)


def test_every_writer_is_here():
    """Each module that calls the one helper has a case above; none makes files by other means."""
    users: set[str] = set()
    there = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    for path in sorted(there - {ROOT / "qjax" / "export" / "files.py"}):
        if path.parent.name == "runtimes" or path.match("contrib/rtl/verilog.py"):
            # what they compile lies in a temporary folder
            continue
        place = path.relative_to(ROOT).as_posix()
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        wrong = [ast.unparse(call) for call in calls if writes(call)]
        assert not wrong, f"{place}: {wrong}: write with qjax.export.files."
        if {"files.write", "files.write_all", "files.write_folder", "write_folder"} & {
            dotted(call.func) for call in calls
        }:
            users.add(place)
    assert len(users) == len(WRITERS), sorted(users)


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_on_a_full_disk(tmp_path, monkeypatch, name):
    """The disk fills at the last step of the last file, when the others are in place."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    WRITERS[name](tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"old")
    before = contents(tmp_path)
    failing(monkeypatch, "replace", len(before))
    with pytest.raises(OSError, match="No space left"):
        WRITERS[name](tmp_path)
    assert contents(tmp_path) == before
    WRITERS[name](tmp_path)
    assert all(data != b"old" for data in contents(tmp_path).values())


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_is_named_as_the_caller_named_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    real = os.open

    def called(path, flags, *rest):
        if str(path).startswith(str(tmp_path)) and flags & os.O_CREAT:
            raise OSError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", called)
    with pytest.raises(files.WriteError, match=r"could not be written: Permission denied\. Choose a folder") as error:
        WRITERS[name](tmp_path)
    assert isinstance(error.value.__cause__, PermissionError)
    assert str(tmp_path) in str(error.value)
    assert ".tmp" not in str(error.value)
    assert contents(tmp_path) == {}


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_bytes(b"old")
    for name in ("taken", "model.c", "model.h"):
        with pytest.raises(ValueError, match=f"{name}: expected a folder for Makefile, model.c, .*Give a folder"):
            emit.emit(GRAPH, "c", tmp_path / name)
    assert contents(tmp_path) == {"taken": b"old"}
    (tmp_path / "sources.c").mkdir()
    emit.emit(GRAPH, "c", tmp_path / "sources.c")
    assert (tmp_path / "sources.c" / "model.c").exists()
