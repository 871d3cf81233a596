"""The reference is whole: every public name and parameter; formula, source and example of methods and targets."""

import dataclasses
import enum
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import qjax
from qjax import calibration, targets
from qjax.numerics.rules import get_rule, rule_names
from qjax.ops import formulas

ROOT = Path(__file__).parents[1]
MODULES = ("calibration", "export", "gguf", "lab", "numerics", "profiles", "targets", "training")
ENTRY = re.compile(r"^[ \t]+(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ", flags=re.M)
"""A parameter, or several, in a docstring."""


def public() -> dict[str, Any]:
    """Every public name with what it is, without modules."""
    homes = [qjax, *(getattr(qjax, name) for name in MODULES)]
    found = {f"{home.__name__}.{name}": getattr(home, name) for home in homes for name in home.__all__}
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}


def shown() -> list[Any]:
    """What docs/api.md has entries of: one by one. A module would leave out functions that are named as files."""
    return [resolved(path) for path in re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), flags=re.M)]


def resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


PUBLIC = public()
CALLED = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, (BaseException, enum.Enum)))
}


def test_the_reference_has_every_public_name():
    there = [id(value) for value in shown()]
    assert [name for name, value in PUBLIC.items() if id(value) not in there] == []
    assert len(PUBLIC) > 150


@pytest.mark.parametrize("name", CALLED)
def test_every_parameter_is_explained(name: str):
    value = CALLED[name]
    said = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        said += "\n" + (inspect.getdoc(value.__init__) or "")
    explained = {one.lstrip("*") for names in ENTRY.findall(said) for one in names.split(", ")}
    taken = inspect.signature(value).parameters.values()
    named = {one.name for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    assert named - explained == set()


@pytest.mark.parametrize("name", [*calibration.estimators(), *calibration.names()])
def test_methods_and_observers_have_a_paper_and_an_example(name: str):
    known = name in calibration.estimators()
    said = inspect.getdoc(type(calibration.estimator(name) if known else calibration.get(name))) or ""
    assert "Paper: " in said
    assert "Examples:\n  >>> " in said


@pytest.mark.parametrize("name", ["Recipe", "Override", "QSpec", "Dynamic", "WeightFormat", "Budget"])
def test_settings_have_an_example(name: str):
    assert dataclasses.is_dataclass(getattr(qjax, name))
    assert ">>> " in (inspect.getdoc(getattr(qjax, name)) or "")


def example_of(value: Any) -> str:
    """The docstring from its first example on; "" where there is none."""
    found = re.search(r"^ *>>> |^ *```python$|\n\n {4}\w", inspect.getdoc(value) or "", flags=re.M)
    return "" if found is None else found.string[found.start() :]


RESULTS = {
    "AccumulatorConstraint",
    "Correction",
    "Distilled",
    "FrozenBase",
    "Loaded",
    "Migration",
    "Moved",
    "Point",
    "PostTrainingReport",
    "Precision",
    "Ranged",
    "Ranges",
    "RebuiltBlock",
    "Reconstruction",
    "Rotated",
    "RoundedLayer",
    "Rounding",
    "Score",
    "Solution",
    "SolvedLayer",
    "StepReport",
    "TensorStatistics",
    "Weights",
    "Wider",
}
"""Records that a function returns: the function has the example."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if callable(PUBLIC[name])])
def test_every_entry_has_an_example(name: str):
    assert example_of(PUBLIC[name]) or name.rpartition(".")[2] in RESULTS


@pytest.mark.exhaustive
def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those without a prompt, with the names of the page's first block; pytest runs the others as doctests."""
    monkeypatch.chdir(tmp_path)
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "docs/api.md").read_text(), flags=re.M | re.S)
    assert block is not None
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(block[1], names)
        codes = {
            code: name
            for name, value in PUBLIC.items()
            for code in re.findall(r"^ *```python\n(.*?)^ *```", example_of(value), flags=re.M | re.S)
        }
        assert len(codes) > 60
        for code, name in codes.items():
            own = names | {"qmodel": nnx.clone(names["qmodel"])}
            exec(compile(textwrap.dedent(code), name, "exec"), own)


@pytest.mark.exhaustive
def test_the_page_of_primitives_is_what_the_registries_say():
    page = (ROOT / "docs/primitives.md").read_text()
    if f"with jax {jax.__version__}." not in page:
        pytest.skip("another jax has other primitives")
    done = subprocess.run(
        [sys.executable, "tools/primitives.py", "--check"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_target_rule_and_formula_is_on_the_page_of_targets():
    done = subprocess.run(
        [sys.executable, "tools/target_rules.py", "--check"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/target-rules.md").read_text()
    # not targets.names(): other tests of the process register targets of their own
    headings = re.findall(r"^## `(\w+)`$", page, flags=re.M)
    assert len(headings) >= 24
    assert {targets.get(name).name for name in headings} == set(headings)
    for path in re.findall(r"^::: (\S+)$", page, flags=re.M):
        assert len(inspect.getdoc(resolved(path)) or "") > 60, path
    assert len(rule_names()) + len(formulas.names()) > 50
    assert all(get_rule(name).name == name.partition(":")[0] or ":" in get_rule(name).name for name in rule_names())
