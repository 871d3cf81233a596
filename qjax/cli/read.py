"""`qjax read`: saves any model file as a .qjax."""

import click

from qjax.cli.parameters import model_argument, output_option, subcommand, target_option


@subcommand(name="read", short_help="Save an .onnx or .tflite model as a .qjax.")
@model_argument
@output_option
@target_option
def command(model: str, output: str, target: str | None) -> None:
    r"""Read a pre-quantized .onnx or .tflite model and save it as a .qjax.

    Without --target, a file written by qjax keeps its own target. Any other file gets the rounding of its format's
    runtime, onnxruntime or tflite_reference.

    \b
    Examples:
      qjax read mobilenet.tflite -o mobilenet.qjax
      qjax read model.onnx -o model.qjax --target tflite_micro
    """
    import os

    from qjax.cli import facts
    from qjax.cli.errors import refusing
    from qjax.cli.models import open_model

    graph = open_model(model, target)
    with refusing():
        graph.save(output)
    found = facts.facts(graph)
    click.echo(f"{facts.heading(found, output)}\n{facts.totals(found)}")
    click.echo(f"{output}: {os.path.getsize(output):,} bytes written")
