"""`qjax doctor`: lists what is installed, and which runtimes work."""

import click

from qjax.cli.errors import DIFFERENT
from qjax.cli.parameters import subcommand

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors", "click", "rich")
EXTRAS = {
    "onnx": ("onnx", "onnxruntime"),
    "tflite": ("ai-edge-litert", "flatbuffers"),
    "gguf": ("gguf",),
    "keras": ("keras",),
    "on its own": ("tflite-micro", "torch", "apache-tvm"),
}


@subcommand(short_help="Show versions, devices and the installed runtimes.")
@click.option("--live", is_flag=True, help="Run a small model on every runtime and compare its codes. Takes a minute.")
def command(live: bool) -> int:
    r"""Show what is installed, which devices JAX has, and which runtimes are available.

    \b
    Exit code: 0 if all is well, 1 if packages conflict, or with --live if a runtime computes different codes.

    \b
    Examples:
      qjax doctor
      qjax doctor --live
    """
    import jax

    from qjax.support.installed import conflict, own_folder

    for title, rows in (("packages", versions(PACKAGES)), *((f"extra {n}", versions(p)) for n, p in EXTRAS.items())):
        click.echo(f"{title}:")
        for name, version in rows:
            click.echo(f"  {name:16}{version}")
    click.echo(f"devices: {', '.join(str(device) for device in jax.devices())}")
    problem = conflict(own_folder())
    if problem is not None:
        click.echo(f"problem: {problem}")
    different = False
    click.echo("runtimes:")
    for name, state, well in answers() if live else found():
        different |= not well
        click.echo(f"  {name:20}{state}{install(name) if state == 'not installed' else ''}")
    return DIFFERENT if problem is not None or different else 0


def install(name: str) -> str:
    """How to install a missing runtime, to be appended to its line."""
    from qjax.runtimes import RUNTIMES

    cure = RUNTIMES[name].install
    return f": {cure}" if cure else ""


def versions(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """(distribution, version), or a note that it is not installed."""
    import importlib.metadata

    rows: list[tuple[str, str]] = []
    for name in names:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def found() -> list[tuple[str, str, bool]]:
    """(runtime, whether its requirements are installed, True, because a missing runtime is no error)."""
    import importlib.util
    import shutil

    from qjax.runtimes import RUNTIMES

    rows: list[tuple[str, str, bool]] = []
    for name, runtime in RUNTIMES.items():
        here = all(importlib.util.find_spec(package) is not None for package in runtime.packages)
        here &= not runtime.programs or any(shutil.which(program) for program in runtime.programs)
        rows.append((name, "installed" if here else "not installed", True))
    return rows


def answers() -> list[tuple[str, str, bool]]:
    """(runtime, what it computed for a small model, whether its codes equal the graph's)."""
    import tempfile

    import jax
    import numpy as np
    from flax import nnx

    import qjax
    from qjax.runtimes import RUNTIMES, prepare

    x = jax.random.normal(jax.random.key(0), (8, 6))
    qmodel = qjax.quantize(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), qjax.Recipe(target="tflite_micro"), x)
    graph = qjax.convert(qmodel, x)
    rows: list[tuple[str, str, bool]] = []
    for name, runtime in RUNTIMES.items():
        asked = graph.retarget(runtime.targets[0]) if runtime.targets else graph
        codes = np.asarray(asked.quantize(x))
        try:
            with tempfile.TemporaryDirectory() as folder:
                got = prepare(name, asked, folder, len(codes), {})([codes])[0]
        except ImportError:
            rows.append((name, "not installed", True))
            continue
        except (OSError, ValueError) as error:
            rows.append((name, f"does not run: {str(error).splitlines()[0]}", True))
            continue
        differ = int(np.sum(np.asarray(got) != np.asarray(asked.run(codes))))
        rows.append((name, f"answers: {differ} of {np.size(got)} codes differ", differ == 0))
    return rows
