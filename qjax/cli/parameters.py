"""Arguments and options that several commands share."""

import inspect
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from qjax.cli.errors import debug_option

_FILE = click.Path(path_type=str)


def subcommand(**attributes: Any) -> Callable[[Callable[..., int | None]], click.Command]:
    r"""Turn a function into a command, whose exit code is the function's return value (None is 0).

    The function's docstring is the help text. In it, a line with the two characters \b preserves the line breaks of the
    paragraph that follows, as click's backspace does. Every command has the option --debug.
    """

    def decorate(function: Callable[..., int | None]) -> click.Command:
        text = inspect.cleandoc(function.__doc__ or "").replace("\\b\n", "\b\n")
        return click.command(**{"help": text, **attributes})(debug_option(function))

    return decorate


class Target(click.ParamType):
    """The name of a target; checked where it is used, because listing the names loads JAX, and completed."""

    name = "target"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from qjax import targets

        return [CompletionItem(name) for name in targets.names() if name.startswith(incomplete)]


class Profile(click.ParamType):
    """The name of a device's profile; completed, and checked where it is used."""

    name = "profile"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from qjax import profiles

        return [CompletionItem(name) for name in profiles.names() if name.startswith(incomplete)]


model_argument: Callable[[Any], Any] = click.argument("model", type=_FILE)

files_argument: Callable[[Any], Any] = click.argument("files", metavar="[INPUT]...", nargs=-1, type=_FILE)

target_option: Callable[[Any], Any] = click.option(
    "--target",
    metavar="T",
    type=Target(),
    help="Use the rounding of this target (see: qjax targets). Default: the model's own target.",
)

codes_option: Callable[[Any], Any] = click.option(
    "--codes", is_flag=True, help="The files hold integer codes instead of floats."
)

seed_option: Callable[[Any], Any] = click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the random codes."
)

examples_option: Callable[[Any], Any] = click.option(
    "--examples",
    metavar="N",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Number of random examples. The first are edge cases: least, greatest, zero, alternating, all codes in turn.",
)

output_option: Callable[[Any], Any] = click.option(
    "-o", "--output", metavar="PATH", required=True, type=_FILE, help="Where to write."
)
