"""The places where other packages extend the core, by name: formats of files, and requirements of devices.

register_emitter("rtl", "qjax.contrib.rtl")    register_profiles("qjax.contrib.profiles.requests")
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

EMITTERS = {format: f"qjax.export.emit.{format}" for format in ("c", "onnx", "stablehlo", "tflite")}
"""Name of a format -> its module, which has `emit(graph, path, **options)` and is imported on first use."""


def register_emitter(format: str, module: str) -> None:
    """Add a format to `graph.emit`.

    Args:
      format: its name. module: the module that has `emit(graph, path, **options)`, imported on first use.

    Raises:
      ValueError: another module writes that format already.
    """
    if EMITTERS.setdefault(format, module) != module:
        raise ValueError(
            f"register_emitter: {EMITTERS[format]} writes {format!r} already: choose another name for {module}."
        )


class Profile(Protocol):
    """The requirements of one device, of which the core reads the proposals for a recipe; see `qjax.profiles`."""

    @property
    def name(self) -> str: ...
    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> Any: ...
    @property
    def activations(self) -> Any: ...
    @property
    def recipe(self) -> Mapping[str, Any]: ...


class Verdict(Protocol):
    """The result of a check; `str()` lists every violation, and it is true if there are none."""

    @property
    def passes(self) -> bool: ...
    @property
    def violations(self) -> tuple[Any, ...]: ...
    def __bool__(self) -> bool: ...
    def document(self) -> dict[str, Any]:
        """The verdict as JSON values."""

    def refuse(self, what: str) -> None:
        """Raise an error that lists the violations, if there are any."""


_PROFILES: list[str] = []


def register_profiles(module: str) -> None:
    """Name the module that knows the requirements of devices, imported on first use.

    It has the functions of `qjax.contrib.profiles.requests`.
    """
    _PROFILES[:] = [module]


def profiles() -> Any:
    """The registered module.

    Raises:
      ValueError: none is registered.
    """
    if not _PROFILES:
        raise ValueError("expected a module of profiles, got none: import qjax itself, which registers qjax.profiles.")
    return importlib.import_module(_PROFILES[0])
