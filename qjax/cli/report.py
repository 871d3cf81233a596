"""`qjax report`: writes one HTML file about a model, or about two."""

import click

from qjax.cli.errors import Refused
from qjax.cli.parameters import codes_option, examples_option, seed_option, subcommand, target_option


@subcommand(name="report", short_help="Write an HTML file that shows a model, or where two differ.")
@click.argument("model", type=click.Path(path_type=str))
@click.argument("other", required=False, type=click.Path(path_type=str))
@click.option(
    "--data", metavar="FILE", multiple=True, type=click.Path(path_type=str), help="A .npz, or one .npy per input."
)
@click.option(
    "--targets", metavar="A,B", help="Compare MODEL under these two targets, or the model's own target with one."
)
@target_option
@codes_option
@click.option("-o", "--output", metavar="PATH", default="report.html", show_default=True, help="Where to write.")
@click.option("--title", metavar="TEXT", help="Title of the page.")
@click.option(
    "--source/--no-source", default=True, help="Show the line of code of each node, if the source file exists."
)
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="Examples per batch."
)
@examples_option
@seed_option
def command(
    model: str,
    other: str | None,
    data: tuple[str, ...],
    targets: str | None,
    target: str | None,
    codes: bool,
    output: str,
    title: str | None,
    source: bool,
    batch_size: int,
    examples: int,
    seed: int,
) -> None:
    r"""Write one HTML file about a model: verdict, network, tensors, accumulators. It can be read offline.

    With OTHER, or with --targets, the file compares two graphs and shows where they first differ, by how much, and
    why. Without --data a comparison uses random codes, while a single model is shown without data.

    \b
    Examples:
      qjax report model.qjax --data images.npz
      qjax report model.tflite --target tflite_xnnpack -o xnnpack.html
      qjax report model.qjax --targets tflite_micro,tflite_xnnpack --data images.npy
    """
    from qjax.cli import inputs
    from qjax.cli.errors import refusing
    from qjax.cli.models import open_model
    from qjax.reporting.report import report
    from qjax.runtimes.batches import batches as slices

    names = [target, target] if targets is None else [name.strip() for name in targets.split(",")]
    if targets is not None and (other is not None or target is not None):
        raise click.UsageError("Give OTHER, --target or --targets, only one of them", click.get_current_context())
    if len(names) > 2 or (targets is not None and not all(names)):
        raise Refused(f"--targets: expected two names with a comma between, or one, got {targets!r}.")
    if len(names) == 1:
        names = [None, *names]
    graph = open_model(model, names[0])
    pair = other is not None or targets is not None
    graphs = (graph, open_model(other or model, names[1])) if pair else (graph,)
    values = None
    if data:
        values = inputs.read(graph.ir, data, codes=codes)
    elif pair:
        values = inputs.random_codes(graph.ir, examples, seed)
    batches = None if values is None else [tuple(one.arrays) for one in slices(graph.ir, values, batch_size)]
    with refusing():
        written = report(graphs if pair else graph, batches, output, title=title, source=source)
    click.echo(f"{written}: {written.stat().st_size:,} bytes")
