"""`qjax quantize`: turns a float .onnx or .tflite file into integers for a runtime, without training."""

from typing import Any

import click

from qjax.cli.errors import Refused
from qjax.cli.parameters import Target, subcommand

EFFORTS = ("none", "fast", "standard", "thorough")
FORMATS = {".tflite": "tflite", ".onnx": "onnx", ".stablehlo": "stablehlo", ".pte": "pte", ".qjax": "qjax"}
"""Ending of the output -> what is written."""


@subcommand(name="quantize", short_help="Quantize a float .onnx or .tflite model for a runtime.")
@click.argument("model", type=click.Path(path_type=str))
@click.option(
    "--data",
    metavar="FILE",
    multiple=True,
    required=True,
    type=click.Path(path_type=str),
    help="Calibration data: a .npz with an array for each input, or one .npy per input.",
)
@click.option("--target", metavar="T", type=Target(), required=True, help="The runtime (see: qjax targets).")
@click.option(
    "-o", "--out", "output", metavar="PATH", required=True, type=click.Path(path_type=str), help="Where to write."
)
@click.option(
    "--bits", metavar="N", type=click.IntRange(2, 16), default=8, show_default=True, help="Bits of the weights."
)
@click.option(
    "--activation-bits", metavar="N", type=click.IntRange(2, 16), default=8, show_default=True, help="Of activations."
)
@click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    default="standard",
    show_default=True,
    help="What to try after calibration: nothing, seconds, minutes, or more.",
)
@click.option("--report", metavar="PATH", type=click.Path(path_type=str), help="Also write an HTML report.")
@click.option(
    "--batch-size", metavar="N", type=click.IntRange(min=1), default=32, show_default=True, help="Examples per batch."
)
@click.option("--signature", metavar="NAME", help="The signature of a .tflite file with several.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.option("--progress/--no-progress", default=None, help="Show progress on stderr. Default: on a terminal.")
def command(
    model: str,
    data: tuple[str, ...],
    target: str,
    output: str,
    bits: int,
    activation_bits: int,
    effort: str,
    report: str | None,
    batch_size: int,
    signature: str | None,
    as_json: bool,
    progress: bool | None,
) -> None:
    r"""Quantize a float .onnx or .tflite model with calibration data, and write it for a runtime.

    The ending of PATH chooses the format: .tflite, .onnx, .stablehlo, .pte, or .qjax, which every other command reads.
    The command compares the integers with the float model on the data and prints the ratio of signal to noise of each
    output in dB. The inputs keep the names, order and axes of the file.

    \b
    Examples:
      qjax quantize model.onnx --data calibration.npz --target tflite_micro -o model.tflite
      qjax quantize model.onnx --data calibration.npz --target onnxruntime --bits 4 -o small.onnx --report report.html
      qjax quantize model.tflite --data images.npy --target tflite_xnnpack --effort thorough -o model.tflite
    """
    import json
    import os
    import warnings

    from qjax import show_progress
    from qjax.cli.errors import refusing
    from qjax.cli.quantizing import compare, examples_of, open_float, quantized, recipe_of, write

    chosen = FORMATS.get(os.path.splitext(output)[1].lower())
    if chosen is None:
        raise Refused(f"{output}: expected a name that ends in {', '.join(FORMATS)}.")
    for path in (output, *([report] if report else [])):
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise Refused(f"{path}: expected a folder {folder!r}, got none: create it first.")
    if progress is not None:
        show_progress(progress)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with refusing():
            recipe = recipe_of(target, bits, activation_bits, chosen)
        module = open_float(model, signature)
        batches = examples_of(module, data, batch_size)
        with refusing():
            qmodel, graph = quantized(module, recipe, batches, effort)
            rows = compare(module, graph, batches)
            if report is not None:
                from qjax.reporting.report import report as write_report

                write_report(qmodel, batches, report, title=os.path.basename(model), source=False)
            write(module.with_file_names(graph), chosen, output)
    said = list(dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning)))
    said += _warnings_of_noise(rows, activation_bits)
    steps = qmodel.post_training_report
    document: dict[str, Any] = {
        "model": model,
        "target": target,
        "bits": bits,
        "activation_bits": activation_bits,
        "effort": effort,
        "examples": sum(len(batch[0]) for batch in batches),
        "outputs": rows,
        "steps": [
            {"step": row.step, "kept": row.kept, "seconds": round(row.seconds, 3), "said": row.said}
            for row in (steps.steps if steps is not None else ())
        ],
        "files": [{"path": path, "bytes": os.path.getsize(path)} for path in (output, report) if path],
        "warnings": said,
    }
    if as_json:
        click.echo(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        _show(document, None if steps is None else str(steps))


def _warnings_of_noise(rows: list[dict[str, Any]], bits: int) -> list[str]:
    """A warning for each output that hardly resembles the float model's."""
    from qjax.calibration import noise
    from qjax.numerics.qspec import QSpec

    least = noise.least(QSpec(bits=bits))
    # no ratio: the float output is 0 everywhere, or one of both is not finite
    found = [row for row in rows if not row["equal"] and (row["sqnr_db"] is None or row["sqnr_db"] < least)]
    return [
        f"output {row['name']!r} keeps {_decibels(row['sqnr_db'])} dB of the float model's; expected at least "
        f"{least:.0f} dB. "
        "Use more --bits, --activation-bits or --effort, or data like those that the model was trained on. The "
        "--report shows which tensor loses most."
        for row in found
    ]


def _show(document: dict[str, Any], steps: str | None) -> None:
    """Print the result for people."""
    from qjax.support.tables import table

    for text in document["warnings"]:
        click.echo(f"qjax: warning: {text}", err=True)
    if steps is not None:
        click.echo(f"{steps}\n")
    rows = [
        [row["name"], "equal" if row["equal"] else _decibels(row["sqnr_db"]), f"{row['max_error']:.4g}", *_same(row)]
        for row in document["outputs"]
    ]
    header = ["output", "dB", "largest error", *(["same class"] if any(map(_same, document["outputs"])) else [])]
    rows = [row + [""] * (len(header) - len(row)) for row in rows]
    click.echo(table(header, rows))
    click.echo(f"Beside the float model, on {document['examples']} examples of the calibration data.\n")
    for file in document["files"]:
        click.echo(f"{file['path']}: {file['bytes']:,} bytes")


def _decibels(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def _same(row: dict[str, Any]) -> list[str]:
    return [] if row["same_class"] is None else [f"{row['same_class']:.1%}"]
