"""The machine and the versions behind a number."""

import os
import platform
from pathlib import Path
from typing import Any

import flax
import jax

from qjax.version import __version__


def machine() -> dict[str, Any]:
    """What the numbers were made with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
        **versions,
        "qjax": __version__,
    }


def made_on() -> str:
    """The sentence of a page that says so."""
    made = machine()
    return f"Made on {made['cpu']}, {made['cores']} cores, jax {made['jax']}, flax {made['flax']}."
