"""Describes the machine and the library versions with which a number was measured."""

import os
import platform
from pathlib import Path
from typing import Any

import flax
import jax

from qjax.support.version import __version__


def machine() -> dict[str, Any]:
    """The machine and the versions, as JSON values."""
    info = Path("/proc/cpuinfo")
    cpu = _cpu(info.read_text() if info.exists() else "") or platform.processor() or platform.machine()
    versions = {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
        **versions,
        "qjax": __version__,
    }


def _cpu(info: str) -> str:
    """The first processor's name in the text of /proc/cpuinfo, with the numbers that distinguish CPUs of that name."""
    fields: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in info.splitlines()):
        fields.setdefault(key.strip(), value.strip())
    name, family, model = (fields.get(key, "") for key in ("model name", "cpu family", "model"))
    return f"{name} (family {family}, model {model})" if name and family and model else name


def made_on() -> str:
    """The sentence that tells the readers of a page on which machine it was made."""
    made = machine()
    return f"Made on {made['cpu']}, {made['cores']} cores, jax {made['jax']}, flax {made['flax']}."
