"""Exit codes, one-line errors, tracebacks where qjax is to blame, and what is loaded when."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from qjax import __version__
from qjax.cli import COMMANDS, program


def process(*arguments: str, cwd=None, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, check=False, cwd=cwd, **options
    )


def test_help_needs_no_jax():
    """Nor does the help of any command, the version, or an error of usage."""
    script = (
        "import sys\nsys.modules['jax'] = sys.modules['numpy'] = None\nfrom qjax.cli import main\n"
        "sys.argv[1:] = eval(sys.argv[1])\nmain()"
    )
    lines = [f"{name} --help" for name in COMMANDS]
    for line, code in {"--help": 0, "--version": 0, lines[0]: 0, "run --nonsense": 2}.items():
        done = process("-c", script, str(line.split()))
        assert done.returncode == code, done.stderr
    everything = "".join(f"try: program({line.split()!r})\nexcept SystemExit: pass\n" for line in lines)
    done = process(
        "-c", script.replace("main()", everything).replace("main", "program").replace("eval(sys.argv[1])", "[]")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: qjax") == len(COMMANDS)


def test_a_real_process(folder):
    done = process("-m", "qjax", "inspect", "dense.qjax", cwd=folder, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dense.qjax: target tflite_micro, 1 nodes")


def test_version(qjax):
    assert qjax("--version").stdout == f"qjax {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(qjax, name):
    text = qjax(name, "--help").stdout
    assert text.startswith(f"Usage: qjax {name} ")
    assert "Examples:" in text
    assert "\\b" not in text


def test_usage(refused):
    assert refused("frobnicate").startswith("No such command 'frobnicate'")
    assert refused("run") == "Missing argument 'MODEL'. See: qjax run --help"
    assert refused("inspect", "dense.qjax", "--batch", "0").endswith("See: qjax inspect --help")


def test_models_that_are_none(refused, folder):
    assert refused("inspect", "none.qjax") == "none.qjax: No such file or directory: check the path"
    assert "expected a model file, got a folder" in refused("inspect", ".")
    (folder / "text.txt").write_text("hello")
    assert (
        refused("inspect", "text.txt")
        == "text.txt: expected a model, .qjax, .onnx, .tflite; its content is none of them."
    )
    (folder / "empty.qjax").write_bytes(b"")
    assert "empty.qjax: expected a qjax artifact, got an empty file" in refused("inspect", "empty.qjax")
    data = (folder / "dense.qjax").read_bytes()
    (folder / "damaged.qjax").write_bytes(data[:-9] + b"x" + data[-8:])
    assert "the file is damaged; copy or download it again." in refused("inspect", "damaged.qjax")
    (folder / "cut.bin").write_bytes(data[:1000])
    assert "cut short" in refused("inspect", "cut.bin")


def test_unreadable_files(refused, folder, monkeypatch):
    def closed(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "dense.qjax")

    monkeypatch.setattr("qjax.cli.models.kind", closed)
    assert refused("inspect", "dense.qjax") == "dense.qjax: Permission denied: check its permissions"


def test_unknown_targets(refused):
    for line in (["inspect", "dense.qjax", "--target", "gpu"], ["targets", "gpu"]):
        assert refused(*line).startswith("Unknown target 'gpu'. No target matches this runtime bit for bit.")


def test_a_kind_is_told_by_content(qjax, folder):
    (folder / "renamed.bin").write_bytes((folder / "dense.qjax").read_bytes())
    assert "1 nodes" in qjax("inspect", "renamed.bin").stdout


def test_debug_shows_the_traceback(qjax):
    for line in (["--debug", "inspect", "none.qjax"], ["inspect", "none.qjax", "--debug"]):
        text = qjax(*line, code=2).stderr
        assert "Traceback" in text
        assert text.splitlines()[-1].startswith("qjax: error: none.qjax")


def failing(monkeypatch, error: BaseException) -> None:
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("qjax.cli.facts.facts", fail)


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ValueError("a bug"), EOFError("a bug"), KeyError("y")])
def test_errors_of_qjax_are_no_refusals(qjax, monkeypatch, error):
    failing(monkeypatch, error)
    text = qjax("inspect", "dense.qjax", code=70).stderr
    assert text.startswith("Traceback")
    assert f"qjax: internal error: {type(error).__name__}: {error}\n" in text


def test_a_broken_module_of_qjax_is_no_missing_library(qjax, monkeypatch):
    def missing(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'qjax.export.none'", name="qjax.export.none")

    monkeypatch.setattr("qjax.cli.models.load", missing)
    assert "internal error" in qjax("inspect", "dense.qjax", code=70).stderr


def test_interrupted(qjax, monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())
    assert qjax("inspect", "dense.qjax", code=130).stderr.endswith("qjax: interrupted\n")


def test_nobody_reads_the_output():
    """The reader is gone before the first byte: no traceback, no complaint at exit."""
    script = (
        "import os, sys\nfrom qjax.cli import program\nimport click\n"
        "@program.command('flood')\ndef flood():\n    for _ in range(10**5): print('x' * 99)\n"
        "type(program).get_command = lambda self, ctx, name: flood\n"
        "program(['flood'])"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_completion(folder):
    """The shell asks through two variables; targets are completed by name."""
    environment = {"_QJAX_COMPLETE": "bash_complete", "COMP_WORDS": "qjax ins", "COMP_CWORD": "1"}
    done = CliRunner().invoke(program, [], env=environment, prog_name="qjax")
    assert done.stdout == "plain,inspect\n"
    environment |= {"COMP_WORDS": "qjax run --target tflite_x", "COMP_CWORD": "3"}
    done = CliRunner().invoke(program, [], env=environment, prog_name="qjax")
    assert done.stdout == "plain,tflite_xnnpack\nplain,tflite_xnnpack_arm\n"


def test_click_is_the_only_import_of_a_commands_file():
    for name in COMMANDS:
        assert isinstance(program.get_command(click.Context(program), name), click.Command)
