"""`qjax emit`: writes a model as a file that another program or device runs."""

import click

from qjax.cli.errors import Refused
from qjax.cli.parameters import model_argument, output_option, subcommand, target_option

OPTIONS = {
    "c": ("batch", "name", "vectors", "simd", "threads"),
    "onnx": ("batch", "style", "codes", "portable", "vnni"),
    "pte": ("batch",),
    "rtl": ("name", "vectors", "language", "stages", "device", "period"),
    "stablehlo": ("batch", "reals"),
    "tflite": ("batch", "int4"),
}
"""Format -> those of the options below that it supports."""


@subcommand(name="emit", short_help="Write a model as C, ONNX, StableHLO, .tflite, .pte or Verilog.")
@model_argument
@click.argument("format", type=click.Choice(list(OPTIONS)), metavar="FORMAT")
@output_option
@target_option
@click.option(
    "--batch", metavar="N", type=click.IntRange(min=1), help="Fix the batch size. Default for c, tflite and pte: 1."
)
@click.option(
    "--style", metavar="NAME", help="onnx: integer, qdq, qoperator, openvino or qonnx. Default: the target's."
)
@click.option("--codes", is_flag=True, default=None, help="onnx, styles qdq and qoperator: codes in and out.")
@click.option(
    "--portable",
    type=click.Choice(["floats", "codes"]),
    help="onnx, style qdq: write for runtimes other than ONNX Runtime.",
)
@click.option("--vnni", is_flag=True, default=None, help="onnx: faster, but only for x86 CPUs with VNNI.")
@click.option("--profile", metavar="NAME", help="Write for this device, after checking its rules (see: qjax check).")
@click.option("--name", metavar="NAME", help="c, rtl: name of the files. Default: model.")
@click.option("--vectors", metavar="N", type=click.IntRange(min=0), help="c, rtl: golden runs in the self-test.")
@click.option(
    "--simd", "simd", flag_value=True, type=click.UNPROCESSED, help="c: use SIMD instructions of x86-64 and AArch64."
)
@click.option(
    "--cortex-m", "simd", flag_value="cortex_m", type=click.UNPROCESSED, help="c: use SIMD instructions of a Cortex-M."
)
@click.option("--threads", is_flag=True, default=None, help="c: mark parallel loops for -fopenmp.")
@click.option("--int4/--no-int4", default=None, help="tflite: pack 4-bit weights. Default: if it is safe.")
@click.option("--language", type=click.Choice(["verilog", "vhdl"]), help="rtl: source language. Default: verilog.")
@click.option("--stages", metavar="N", type=click.IntRange(min=0), help="rtl: pipeline stages. Default: no clock.")
@click.option("--device", metavar="PART", help="rtl: the FPGA for the project's scripts.")
@click.option("--period", metavar="NS", type=click.FloatRange(min=0, min_open=True), help="rtl: clock period in ns.")
@click.option("--reals", is_flag=True, default=None, help="stablehlo: floats instead of codes in and out.")
def command(model: str, format: str, output: str, target: str | None, profile: str | None, **options: object) -> None:
    r"""Write a model as FORMAT: c or rtl (folders), onnx, stablehlo, tflite or pte (ExecuTorch).

    c, rtl, onnx and stablehlo can express the rounding of any target. A .tflite or .pte is rounded by the runtime that
    loads it, so its target must be that runtime.

    \b
    Examples:
      qjax emit model.qjax onnx -o model.onnx
      qjax emit model.qjax tflite -o model.tflite --target tflite_micro
      qjax emit model.qjax c -o firmware/model --name digits --batch 1
      qjax emit model.qjax rtl -o fpga/model --stages 4
    """
    import os

    from qjax.cli.errors import refusing
    from qjax.cli.models import open_model

    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - set(OPTIONS[format]):
        taken = ", ".join(f"--{name}" for name in OPTIONS[format])
        raise Refused(f"--{key} is not an option of the format {format}, which supports {taken}.")
    graph = open_model(model, target)
    with refusing():
        graph.emit(format, output, profile=profile, **given)
    click.echo(f"{output}: {format}, target {graph.target}")
    folder = os.path.isdir(output)
    for name in sorted(os.listdir(output)) if folder else [output]:
        path = os.path.join(output, name) if folder else name
        if os.path.isdir(path):
            continue
        click.echo(f"  {name}: {os.path.getsize(path):,} bytes")
