"""`qjax compare`: finds where two models, or one model under two targets, begin to differ."""

import click

from qjax.cli.errors import DIFFERENT, Refused
from qjax.cli.parameters import codes_option, examples_option, model_argument, seed_option, subcommand


@subcommand(name="compare", short_help="Find where two models, or two targets, differ.")
@model_argument
@click.argument("files", metavar="[OTHER] [INPUT]...", nargs=-1, type=click.Path(path_type=str))
@click.option(
    "--targets", metavar="A,B", help="Compare MODEL under these two targets, or the model's own target with one."
)
@codes_option
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="Examples per batch."
)
@examples_option
@seed_option
def command(
    model: str,
    files: tuple[str, ...],
    targets: str | None,
    codes: bool,
    batch_size: int,
    examples: int,
    seed: int,
) -> int:
    r"""Find where two graphs of one model first differ, by how much, and why.

    OTHER is a second model file. Without it, MODEL is compared under two --targets. INPUT is the same as for qjax run;
    without it both get random codes, of which the first are edge cases.

    \b
    Exit code: 0 if no code of any node differs, 1 if some do.

    \b
    Examples:
      qjax compare model.qjax --targets tflite_micro,tflite_xnnpack images.npy
      qjax compare before.qjax after.qjax images.npy
    """
    from qjax.cli import inputs
    from qjax.cli.errors import refusing
    from qjax.cli.models import is_model, open_model
    from qjax.comparison.compare import compare
    from qjax.runtimes.batches import batches

    other = files[0] if files and is_model(files[0]) else None
    given = files if other is None else files[1:]
    names = [None, None] if targets is None else [name.strip() for name in targets.split(",")]
    if (other is None) == (targets is None):
        raise click.UsageError("Give a second model or --targets, and not both", click.get_current_context())
    if targets is not None and (len(names) > 2 or not all(names)):
        raise Refused(f"--targets: expected two names with a comma between, or one, got {targets!r}.")
    if len(names) == 1:
        names = [None, *names]
    a = open_model(model, names[0])
    b = open_model(model if other is None else other, names[1])
    if given:
        values = inputs.read(a.ir, given, codes=codes)
    else:
        values = inputs.random_codes(a.ir, examples, seed)
    with refusing():
        result = compare(a, b, (tuple(one.arrays) for one in batches(a.ir, values, batch_size)))
    click.echo(str(result))
    return 0 if result.equal else DIFFERENT
