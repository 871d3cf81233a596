"""The examples of docs/command-line.md: `python -m tests.cli.docs` runs them and writes their outputs anew."""

import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Callable

import numpy as np
from click.testing import CliRunner

from qjax.cli import program
from tests.cli import models

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", flags=re.M | re.S)


def make_files(folder: pathlib.Path) -> None:
    """What the page's commands find in their folder."""
    models.network().save(folder / "model.qjax")
    images = np.random.default_rng(0).uniform(-1, 1, (32, 8, 8, 1)).astype(np.float32)
    np.save(folder / "images.npy", images)


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of one block, with what stands behind each."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def output(line: str) -> str:
    """What a command prints; `echo $?` behind it prints its exit code."""
    line, _, tail = line.partition("; ")
    start, *arguments = shlex.split(line)
    assert start == "qjax"
    result = CliRunner().invoke(program, arguments)
    return result.output + (f"{result.exit_code}\n" if tail == "echo $?" else "")


def rewritten(text: str) -> str:
    """The page with every output as it is now; run it in a folder of `make_files`."""

    def block(match: re.Match[str]) -> str:
        return "```console\n" + "".join(f"$ {line}\n{output(line)}" for line, _ in commands(match[1])) + "```"

    return BLOCK.sub(block, text)


def in_folder(function: Callable[[], str]) -> str:
    """The function's value in a new folder with the files."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        make_files(pathlib.Path(folder))
        os.chdir(folder)
        try:
            return function()
        finally:
            os.chdir(before)


if __name__ == "__main__":
    PAGE.write_text(in_folder(lambda: rewritten(PAGE.read_text())))
