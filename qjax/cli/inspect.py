"""`qjax inspect`: what a model contains and what it costs."""

import json

import click

from qjax.cli.parameters import model_argument, subcommand, target_option


@subcommand(name="inspect", short_help="Show a model's nodes, scales, arithmetic and cost.")
@model_argument
@target_option
@click.option("--nodes/--tensors", default=True, help="Print a table of the nodes (the default), or of all tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print nodes, tensors and totals as one JSON document.")
@click.option(
    "--batch",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The batch size for which MACs and bytes of activations are counted.",
)
def command(model: str, target: str | None, nodes: bool, as_json: bool, batch: int) -> None:
    r"""Show the nodes of a model, its scales, its arithmetic and its cost.

    "method" names the rule or formula that requantizes accumulators. "bits" is the width that the accumulator needs
    for the worst input, including its bias, and "headroom" is the unused rest of its register. MACs include products
    with padding, but not with the zeros that a transposed convolution inserts.

    \b
    Examples:
      qjax inspect model.qjax
      qjax inspect model.tflite --tensors
      qjax inspect model.qjax --json | jq .totals
    """
    from qjax.cli import facts
    from qjax.cli.models import open_model

    found = facts.facts(open_model(model, target), batch)
    if as_json:
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    rows = facts.node_table(found) if nodes else facts.tensor_table(found)
    click.echo("\n\n".join((facts.heading(found, model), rows, facts.totals(found))))
