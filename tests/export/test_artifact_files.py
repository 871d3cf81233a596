"""Artifacts as files: all or nothing, sane permissions, and clear words for what is not an artifact."""

import contextlib
import os
import re
import resource
import stat
import subprocess
import sys

import numpy as np
import pytest

from qjax.export.artifact import ArtifactError, GraphError, load, save, to_bytes
from qjax.graph.ir import Tensor
from tests.export.graphs import constant, differences, graph_of, rich_graph


def broken_call(*_args, **_kwargs):
    raise OSError("simulated")


@contextlib.contextmanager
def file_size_limit(size: int):
    """A full disk, as far as a process can tell: writes beyond `size` bytes fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "os.chmod"])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "m.qjax"
    save(rich_graph(), path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(call, broken_call)
        with pytest.raises(OSError, match="simulated"):
            save(graph_of(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.qjax"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.qjax"
    save(graph_of(), path)
    before = path.read_bytes()
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        save(rich_graph(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.qjax"]


def test_a_graph_that_cannot_be_saved_touches_nothing(tmp_path):
    path = tmp_path / "m.qjax"
    save(graph_of(), path)
    before = path.read_bytes()
    with pytest.raises(GraphError):
        save(graph_of(Tensor("w", (None,), "float32")), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.qjax"]


KILLER = """
import os, signal, sys, time
import numpy as np
from qjax.export.artifact import save
from tests.export.graphs import constant, graph_of

graphs = [graph_of(constant("w", np.full(2_000_000, i), "int8")) for i in range(2)]
save(graphs[0], sys.argv[1])
for round in range(20):
    process = os.fork()
    if not process:
        while True:
            for graph in graphs:
                save(graph, sys.argv[1])
    time.sleep(0.02 + 0.0017 * round)
    os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    with open(sys.argv[1], "rb") as file, open(f"{sys.argv[1]}.{round}", "wb") as copy:
        copy.write(file.read())
"""


def test_kill_in_the_middle(tmp_path):
    """SIGKILL, twenty times, while two graphs are saved in turn: the file is always one of them, whole."""
    path = tmp_path / "m.qjax"
    subprocess.run([sys.executable, "-W", "ignore", "-c", KILLER, str(path)], check=True)
    wanted = [to_bytes(graph_of(constant("w", np.full(2_000_000, i), "int8"))) for i in range(2)]
    for count in range(20):
        assert (tmp_path / f"m.qjax.{count}").read_bytes() in wanted
    assert load(path).nodes[0].name == "flatten"
    save(graph_of(), path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"m.qjax", *(f"m.qjax.{count}" for count in range(20))}


def test_a_new_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(graph_of(), tmp_path / "m.qjax")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.qjax").stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "m.qjax"
    save(graph_of(), path)
    path.chmod(mode)
    save(rich_graph(), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert differences(rich_graph(), load(path)) == []


def test_a_link_is_followed(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "latest.qjax").symlink_to(tmp_path / "store" / "v1.qjax")
    save(graph_of(), tmp_path / "latest.qjax")
    save(rich_graph(), tmp_path / "latest.qjax")
    assert (tmp_path / "latest.qjax").is_symlink()
    assert differences(rich_graph(), load(tmp_path / "store" / "v1.qjax")) == []


def test_relative_and_awkward_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "é\u4e2d.qjax", "n" * 250 + ".qjax", " .qjax"):
        save(graph_of(), name)
        assert differences(graph_of(), load(name)) == []


def test_save_into_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a folder '.*/missing', got none: create it first"):
        save(graph_of(), tmp_path / "missing" / "m.qjax")
    with pytest.raises(ArtifactError, match="expected the name of a file, got a folder: choose another name"):
        save(graph_of(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_load_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"m\.qjax: expected a qjax artifact, got no file: check the path"):
        load(tmp_path / "m.qjax")
    with pytest.raises(ArtifactError, match=r"expected a file, got a folder: give the path of the file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="expected a file, got a pipe or a device"):
        load(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="expected a file, got a pipe or a device"):
        load("/dev/zero")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a qjax artifact, got an empty file: write it again"),
        (b"PK\x03\x04" + b"\x00" * 100, r"expected a qjax artifact .*, got b'PK.*: is this the right file\?"),
        (b"\x80\x04\x95" + b"." * 100, r"expected a qjax artifact .*: is this the right file\?"),
        (
            b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
            r"expected a qjax artifact .*: is this the right file\?",
        ),
        (
            b"abc",
            r"expected the fields sha256, bytes, version and graph .*: the file is damaged or cut short",
        ),
    ],
)
def test_load_what_is_no_artifact(tmp_path, content, message):
    (tmp_path / "m.qjax").write_bytes(content)
    with pytest.raises(ArtifactError, match=f"^{re.escape(str(tmp_path))}/m.qjax: {message}"):
        load(tmp_path / "m.qjax")


def test_load_within_a_limit(tmp_path):
    path = tmp_path / "m.qjax"
    save(rich_graph(), path)
    size = path.stat().st_size
    assert differences(rich_graph(), load(path, max_bytes=size)) == []
    with pytest.raises(ArtifactError, match=f"at most {size - 1} bytes, got {size}: .* load it with max_bytes={size}"):
        load(path, max_bytes=size - 1)
    # A file of 5 GiB that takes no room on the disk is refused before a byte of it is read.
    with open(path, "ab") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(ArtifactError, match="expected at most 4294967296 bytes, got 5368709120"):
        load(path)
