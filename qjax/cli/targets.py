"""`qjax targets`: lists the targets, the runtimes whose rounding a graph can match."""

import dataclasses

import click

from qjax.cli.parameters import Target, subcommand


@subcommand(name="targets", short_help="List the targets: runtimes whose rounding qjax computes.")
@click.argument("name", required=False, type=Target())
def command(name: str | None) -> None:
    r"""List the targets, or show what one of them computes, operation by operation.

    \b
    Examples:
      qjax targets
      qjax targets tflite_micro
    """
    from qjax import targets
    from qjax.cli.errors import refusing
    from qjax.support.tables import table

    if name is None:
        rows = [(known, targets.get(known).description) for known in targets.names()]
        click.echo(table(("target", "what it is"), rows))
        return
    with refusing():
        target = targets.get(name)
    click.echo(f"{target.name}: {target.description}")
    rows = [(field.name, _text(getattr(target, field.name))) for field in dataclasses.fields(target)[1:-1]]
    click.echo(table(("what", "how"), rows))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if dataclasses.is_dataclass(value) and hasattr(value, "rule"):
        form = getattr(value, "scale", "f64")
        rule = str(getattr(value, "rule", ""))
        return rule if form == "f64" else f"{rule}, scale in float32"
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value))) or "-"
    return str(getattr(value, "value", value))
