"""`qjax check`: checks whether a model follows the rules of a device."""

import click

from qjax.cli.errors import DIFFERENT
from qjax.cli.parameters import Profile, subcommand, target_option


@subcommand(name="check", short_help="Check a model against the rules of a device.")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--profile", "name", metavar="NAME", type=Profile(), help="The device. Without MODEL, list its rules.")
@target_option
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON document.")
def command(model: str | None, name: str | None, target: str | None, as_json: bool) -> int:
    r"""Check a model against the rules of a device, each of which names its source.

    If the device takes the format of a .tflite or .onnx file, the file itself is checked, whoever wrote it. For any
    other model, qjax checks the file that it would write for the device. Without a MODEL the command lists the rules
    of the device, and without a --profile the devices.

    \b
    Exit code: 0 if the model follows every rule, 1 if it breaks some.

    \b
    Examples:
      qjax check
      qjax check --profile ethos_u
      qjax check model.tflite --profile ethos_u
      qjax check model.qjax --profile tensorrt --json | jq .violations
    """
    import json

    from qjax.cli.errors import Refused, refusing
    from qjax.cli.models import kind, open_model
    from qjax.support import extensions

    profiles = extensions.profiles()
    if model is None:
        with refusing():
            click.echo(profiles.devices_table() if name is None else profiles.rules_table(profiles.get(name)))
        return 0
    if name is None:
        raise Refused(f"expected --profile NAME, one of {', '.join(profiles.names())}.")
    with refusing():
        profile = profiles.get(name)
        if target is None and kind(model) == profile.format:
            with open(model, "rb") as file:
                verdict = profiles.check_file(file.read(), profile)
        else:
            verdict = open_model(model, target).check(profile)
    if as_json:
        click.echo(json.dumps(verdict.document(), indent=1, ensure_ascii=False))
    else:
        click.echo(str(verdict))
    return 0 if verdict.passes else DIFFERENT
