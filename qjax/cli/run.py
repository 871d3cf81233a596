"""`qjax run`: runs a model on arrays from files."""

import click

from qjax.cli.parameters import codes_option, files_argument, model_argument, subcommand, target_option


@subcommand(name="run", short_help="Run a model on arrays from files.")
@model_argument
@files_argument
@click.option(
    "-o", "--output", metavar="PATH", type=click.Path(path_type=str), help="Write a .npy (one output) or a .npz."
)
@codes_option
@target_option
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(min=1), help="Run this many examples at a time. Default: all."
)
def command(
    model: str, files: tuple[str, ...], output: str | None, codes: bool, target: str | None, batch_size: int | None
) -> None:
    r"""Run a model on the arrays in INPUT. Inputs and outputs are floats, or codes with --codes.

    INPUT is one .npz with arrays named after the model's inputs (or arr_0, arr_1, ... in their order), or one .npy
    for each input. Floats are float32 and codes have the input's dtype, because nothing is cast. Without -o the
    command prints a summary of the outputs.

    \b
    Examples:
      qjax run model.qjax images.npy
      qjax run model.qjax images.npy -o scores.npy --batch-size 256
      qjax run model.tflite codes.npy --codes -o out.npz
    """
    from qjax.cli import arrays, execute, inputs
    from qjax.cli.errors import refusing
    from qjax.cli.models import open_model

    graph = open_model(model, target)
    if output is not None:
        with refusing():
            arrays.check_output(output, len(set(graph.ir.outputs)))
    execute.check_outputs(graph.ir, codes)
    values = inputs.read(graph.ir, files, codes=codes)
    found = execute.run(graph, values, codes=codes, batch_size=batch_size)
    if output is None:
        click.echo(execute.summary(found))
        return
    with refusing():
        arrays.write(output, found)
    click.echo(f"{output}: {', '.join(execute.signature(name, value) for name, value in found.items())}")
