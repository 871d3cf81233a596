"""Model files, made once, and the command line in this process."""

import pytest
from click.testing import CliRunner

from qjax.cli import program
from tests.cli import models


@pytest.fixture(scope="session")
def graphs():
    return {"dense": models.dense(), "network": models.network(), "pair": models.pair()}


@pytest.fixture(scope="session")
def folder(graphs, tmp_path_factory):
    """A folder with dense.qjax, network.qjax, pair.qjax."""
    path = tmp_path_factory.mktemp("cli")
    for name, graph in graphs.items():
        graph.save(path / f"{name}.qjax")
    return path


@pytest.fixture
def qjax(folder, monkeypatch):
    """Runs a command in that folder and checks its exit code."""
    monkeypatch.chdir(folder)

    def run(*arguments: object, code: int = 0):
        result = CliRunner().invoke(program, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def refused(qjax):
    """The one line of the error of a refused command, without its start."""

    def run(*arguments: object) -> str:
        result = qjax(*arguments, code=2)
        assert result.stdout == ""
        start, _, message = result.stderr.partition("qjax: error: ")
        assert start == ""
        assert message.count("\n") == 1, message
        return message.rstrip("\n")

    return run
