"""What is installed, what is published, and names that were nearly right."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import qjax
from qjax import targets
from qjax.support.installed import conflict
from qjax.support.names import did_you_mean

ROOT = Path(__file__).parents[1]


def test_the_other_project_of_that_name_is_named(tmp_path):
    assert conflict(str(tmp_path)) is None
    (tmp_path / "qjax_quant-0.1.0.dist-info").mkdir()
    assert conflict(str(tmp_path)) is None
    (tmp_path / "qjax-0.2.0.dist-info").mkdir()
    assert "Tsallis" in (conflict(str(tmp_path)) or "")
    os.symlink(ROOT / "qjax", tmp_path / "qjax")
    done = subprocess.run(
        [sys.executable, "-c", "import qjax"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert "UserWarning" in done.stderr
    assert "pip uninstall qjax qjax-quant" in done.stderr


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "qjax-quant"
    assert "version" in project["dynamic"]
    assert f"\nversion: {qjax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_links_of_the_long_description_become_addresses():
    spec = importlib.util.spec_from_file_location("metadata", ROOT / "tools" / "metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.absolute((ROOT / "README.md").read_text(), "https://example.org/q", "v1")
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", made) if not link.startswith(("https://", "#"))] == []
    text = "[a](docs/a.md#b) ![p](p.png) [u](https://x.y) [h](#here)"
    assert (
        module.absolute(text, "R", "v1")
        == "[a](R/blob/v1/docs/a.md#b) ![p](R/raw/v1/p.png) [u](https://x.y) [h](#here)"
    )


def test_workflows_call_what_there_is():
    targets_of_make = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(files) >= 4
    for file in files:
        jobs = yaml.safe_load(file.read_text())["jobs"].values()
        commands = "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
        called = " ".join(re.findall(r"\bmake((?: [a-z][a-z0-9-]*(?!\S))+)", commands)).split()
        assert set(called) <= targets_of_make, file
        paths = re.findall(r"(?<!\S)(?:tests|tools|qjax)/[\w./-]+", commands)
        assert [path for path in paths if not (ROOT / path).exists()] == [], file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tflite-mikro", " Did you mean 'tflite_micro'?"),
        ("fbgemm", " Did you mean 'torch_fbgemm'?"),
        ("zzzz", ""),
        (3, ""),
    ],
)
def test_the_nearest_target(name, said):
    assert did_you_mean(name, targets.names()) == said


def test_errors_say_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'tflite_micro'"):
        targets.get("tflitemicro")
    with pytest.raises(ValueError, match="Did you mean 'pact'"):
        qjax.Recipe(method="pakt")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Did you mean 'percentile'"):
        qjax.calibration.get("percentil")
