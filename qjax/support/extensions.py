"""The places where other packages extend the core, by name: files, styles, vectors, public names, profiles.

register_emitter("rtl", "qjax.contrib.rtl")    register_profiles("qjax.contrib.profiles.requests")
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
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
    _claim("register_emitter", EMITTERS, format, module)


def _claim(function: str, modules: dict[Any, str], name: Any, module: str) -> None:
    """Enter a module under a name, which may belong to one module only."""
    if modules.setdefault(name, module) != module:
        raise ValueError(f"{function}: {modules[name]} has {name!r} already: choose another name for {module}.")


ONNX_STYLES = {style: f"qjax.export.emit.onnx.{style}" for style in ("integer", "qdq", "qoperator")}
"""A style of .onnx files -> its module, which has `to_model(graph, *, batch, ...)` and is imported on first use."""
STYLE_OF_TARGET = {"onnxruntime": "qdq", "onnxruntime_avx2": "qdq"}
"""Target -> the style of .onnx files for its runtime; "integer" for all others."""


def register_style(style: str, module: str, target: str | None = None) -> None:
    """Add a style to the emitter of ONNX.

    Args:
      module: the module that has `to_model(graph, *, batch, codes, vnni)`. target: whose graphs are written so by
        default.

    Raises:
      ValueError: another module has that style, or the target another style.
    """
    _claim("register_style", ONNX_STYLES, style, module)
    if target is not None:
        _claim("register_style", STYLE_OF_TARGET, target, style)


VECTORS: dict[bool | str, str] = {}
"""A value of `simd` in `graph.emit("c", ...)` -> its module, which `qjax.export.emit.c.vectors` describes."""


def register_vectors(simd: bool | str, module: str) -> None:
    """Add a value of `simd` to the emitter of C; the module has its forms in `FORMS` and is imported on first use.

    Raises:
      ValueError: another module has that value.
    """
    _claim("register_vectors", VECTORS, simd, module)


_AROUND: list[str] = []
"""The modules whose `around_function()` is a context in which functions of parameters are called."""


def register_around_functions(module: str) -> None:
    """Add a context to the calls of `qjax.from_function`'s functions; the module is imported when one is called."""
    if module not in _AROUND:
        _AROUND.append(module)


@contextlib.contextmanager
def around_functions() -> Iterator[None]:
    """All registered contexts at once."""
    with contextlib.ExitStack() as stack:
        for module in _AROUND:
            stack.enter_context(importlib.import_module(module).around_function())
        yield


_NAMES: dict[str, list[str]] = {}
"""Package of the core -> the modules outside the core whose public names it has, too."""


def register_names(package: str, module: str) -> None:
    """Add the `__all__` of a module to the names of a package; it is imported when such a name is first asked for."""
    modules = _NAMES.setdefault(package, [])
    if module not in modules:
        modules.append(module)


def find_name(package: str, name: str) -> Any:
    """The value of a public name that a registered module adds to a package.

    Raises:
      AttributeError: no module does.
    """
    for module in () if name.startswith("_") else map(importlib.import_module, _NAMES.get(package, ())):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


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
    @property
    def operators(self) -> tuple[tuple[str, int], ...]: ...
    def __bool__(self) -> bool: ...
    def document(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        ...

    def refuse(self, what: str) -> None:
        """Raise an error that lists the violations, if there are any."""


_PROFILES: dict[str, str] = {}


def register_profiles(module: str) -> None:
    """Name the module that knows the requirements of devices, imported on first use.

    It has the functions of `qjax.contrib.profiles.requests`.

    Raises:
      ValueError: another module is named already.
    """
    _claim("register_profiles", _PROFILES, "profiles", module)


def profiles() -> Any:
    """The registered module.

    Raises:
      ValueError: none is registered.
    """
    if not _PROFILES:
        raise ValueError("expected a module of profiles, got none: import qjax itself, which registers qjax.profiles.")
    return importlib.import_module(_PROFILES["profiles"])
