"""The command line `qjax`: quantizes a model, inspects it, runs it, verifies it on a runtime and converts it.

There is one file per command. A command's file declares its arguments and imports nothing but click; it imports JAX and
qjax only when it runs, so that help, completion and usage errors are instant.

Exit codes: 0 success, and equal if something was compared; 1 a comparison found differences; 2 wrong usage or input;
70 an error of qjax itself; 130 interrupted; 141 the output was closed before the end.
"""

import importlib
import sys

import click

import qjax
from qjax.cli.errors import REFUSED, Program, debug_option
from qjax.support.installed import conflict, own_folder
from qjax.support.names import did_you_mean
from qjax.support.version import __version__

COMMANDS = (
    "quantize",
    "inspect",
    "run",
    "verify",
    "compare",
    "report",
    "check",
    "emit",
    "read",
    "targets",
    "doctor",
)
"""The commands in the order of the help."""


class _Commands(Program):
    """A group in which every command is the object `command` of the module with its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = did_you_mean(cmd_name, COMMANDS)
            if near:
                ctx.fail(f"No such command {cmd_name!r}.{near.rstrip('?')}")
            return None
        return importlib.import_module(f"qjax.cli.{cmd_name}").command


_HELP = """Quantize models, inspect them, run them, verify them on a runtime, and convert them.

MODEL is a .qjax, .onnx or .tflite file, recognised by its content. `quantize` takes float models, and the other
commands quantized ones.

\b
Examples:
  qjax quantize float.onnx --data images.npz --target tflite_micro -o model.tflite
  qjax inspect model.qjax
  qjax run model.qjax images.npy -o scores.npy
  qjax verify model.tflite --runtime tflite-micro
  qjax compare model.qjax --targets tflite_micro,tflite_xnnpack images.npy
  qjax report model.qjax --data images.npz
  qjax check model.tflite --profile ethos_u
  qjax emit model.qjax c -o firmware/model

\b
Exit codes: 0 success or equal, 1 different, 2 wrong usage or input, 70 an error of qjax itself.
Completion: eval "$(_QJAX_COMPLETE=bash_source qjax)"; for other shells, zsh_source or fish_source.
"""


@click.group(
    cls=_Commands, help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="qjax", message="%(prog)s %(version)s")
@debug_option
def program() -> None:
    """The group of all commands."""


def main() -> None:
    """The entry point of the script `qjax` and of `python -m qjax`."""
    problem = conflict(own_folder())
    if problem is not None and "IntegerGraph" not in getattr(qjax, "__all__", ()):
        # The files of the other project have overwritten those of qjax.
        click.echo(f"qjax: error: {problem}", err=True)
        sys.exit(REFUSED)
    program()
