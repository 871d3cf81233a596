"""Formats errors for the user: one line with the cure, or the traceback if qjax itself is at fault."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

DIFFERENT = 1
REFUSED = 2
INTERNAL = 70
"""EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 + the signal's number, as in shells."""

_DEBUG = "qjax.debug"


class Refused(click.ClickException):
    """A mistake of the user, or something missing on this machine; the message includes the cure."""

    exit_code = REFUSED


@contextlib.contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """Treat wrong values, and files that cannot be read or written, as the user's to fix instead of errors of qjax.

    A library that is not installed counts too; a module of qjax's own that cannot be imported does not.

    Args:
      what: a prefix of the message, before a colon.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "qjax":
            raise
        raise Refused(f"{what}: {_text(error)}" if what else _text(error)) from error


def _text(error: Exception) -> str:
    # An error of the operating system has parts, whereas an error of qjax is a sentence already.
    if isinstance(error, OSError) and error.strerror:
        cure = ""
        if isinstance(error, PermissionError):
            cure = ": check its permissions"
        elif isinstance(error, FileNotFoundError):
            cure = ": check the path"
        name = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return f"{name}{error.strerror}{cure}"
    return str(error) or type(error).__name__


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    # One dictionary serves a context and all nested ones.
    ctx.meta[_DEBUG] = ctx.meta.get(_DEBUG, False) or value


debug_option: Callable[[Any], Any] = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of every error.",
)
"""Accepted before and after the name of a command."""


class Program(click.Group):
    """A group that formats errors as this module defines; the return value of a command is the exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and end the process with its exit code."""
        # The overloads distinguish the two values of standalone_mode.
        inner: Any = super().main
        try:
            code = inner(args, "qjax", complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            _show(error)
            code = REFUSED
        except click.Abort:
            click.echo("qjax: interrupted", err=True)
            code = INTERRUPTED
        except BrokenPipeError:
            code = BROKEN_PIPE
        except Exception as error:
            code = _internal(error)
        if code == BROKEN_PIPE:
            _silence()
        sys.exit(code or 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; returns its exit code. A refusal is passed on to `main`."""
        try:
            return super().invoke(ctx)
        except (click.Abort, click.exceptions.Exit, KeyboardInterrupt):
            raise
        except click.ClickException:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            raise
        except BrokenPipeError:
            return BROKEN_PIPE
        except EOFError as error:
            # Handle EOFError here, because click would take it for the end of interactive input.
            return _internal(error)


def _show(error: click.ClickException) -> None:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.rstrip('.')}. See: {error.ctx.command_path} --help"
    click.echo(f"qjax: error: {message}", err=True)


def _internal(error: Exception) -> int:
    traceback.print_exception(error)
    click.echo(
        f"qjax: internal error: {type(error).__name__}: {error}\n"
        "This is a bug of qjax, not of your input: please report it with the lines above.",
        err=True,
    )
    return INTERNAL


def _silence() -> None:
    """Discard what is still buffered, so that the interpreter's exit does not fail on the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
