"""`qjax verify`: checks whether a real runtime computes the codes of the graph."""

import click

from qjax.cli.errors import DIFFERENT
from qjax.cli.parameters import (
    codes_option,
    examples_option,
    files_argument,
    model_argument,
    seed_option,
    subcommand,
    target_option,
)
from qjax.runtimes import RUNTIMES

_RUNTIMES = "\n".join(f"  {name:18}{runtime.what}" for name, runtime in RUNTIMES.items())


@subcommand(
    name="verify",
    short_help="Compare a model's codes with those of a real runtime.",
    help=f"""Run a model on a real runtime and compare every code of its outputs with qjax's interpreter.

qjax writes the model into a temporary folder, from which the runtime loads it and runs it on INPUT (see: qjax run
--help), or on random codes, of which the first are edge cases. --expect compares the outputs with those in a file,
which for example a device computed; --runtime is then optional.

\b
Runtimes:
{_RUNTIMES}

\b
Exit code: 0 if no code differs, 1 if some do.

\b
Examples:
  qjax verify model.qjax --runtime onnxruntime
  qjax verify model.tflite --runtime tflite-micro --examples 1000
  qjax verify model.qjax codes.npy --codes --expect device.npy
""",
)
@model_argument
@files_argument
@click.option("--runtime", type=click.Choice(list(RUNTIMES)), metavar="NAME", help="One of the runtimes above.")
@click.option(
    "--expect", metavar="PATH", type=click.Path(path_type=str), help="Outputs to compare with: codes or float32 values."
)
@codes_option
@target_option
@click.option("--style", metavar="NAME", help="Style of the .onnx of onnxruntime and onnx-reference (see: qjax emit).")
@click.option(
    "--batch",
    metavar="N",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Examples per call of the runtime.",
)
@examples_option
@seed_option
def command(
    model: str,
    files: tuple[str, ...],
    runtime: str | None,
    expect: str | None,
    codes: bool,
    target: str | None,
    style: str | None,
    batch: int,
    examples: int,
    seed: int,
) -> int:
    """Run a model on a real runtime and compare."""
    from qjax.cli import inputs, verifying
    from qjax.cli.errors import Refused
    from qjax.cli.models import open_model

    if runtime is None and expect is None:
        raise click.UsageError(f"Give --runtime ({', '.join(RUNTIMES)}) or --expect PATH", click.get_current_context())
    if expect is not None and not files:
        raise Refused("--expect needs the inputs that its outputs belong to: qjax verify MODEL INPUT --expect PATH")
    if style is not None and (runtime is None or RUNTIMES[runtime].module != "qjax.runtimes.onnx"):
        raise Refused("--style is for the runtimes that take an .onnx: onnxruntime, onnxruntime-plain, onnx-reference.")
    graph = open_model(model, target)
    if files:
        values = verifying.as_codes(graph, inputs.read(graph.ir, files, codes=codes), codes)
    else:
        values = inputs.random_codes(graph.ir, examples, seed)
    options = {} if style is None else {"style": style}
    results = verifying.verify(graph, values, runtime, expect, batch, options)
    for result in results:
        click.echo(result)
    return DIFFERENT if any(not result.equal for result in results) else 0
