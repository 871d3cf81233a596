"""The code of the README and of the pages about artifacts runs as it stands."""

import pathlib
import re
import subprocess
import sys

import jax
import pytest

from tests.page_names import NAMES

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/quick-start.md",
    "docs/how-to/target.md",
    "docs/how-to/lost-accuracy.md",
    "docs/how-to/convert.md",
    "docs/how-to/train.md",
    "docs/coming-from.md",
    "docs/gallery.md",
    "docs/binary.md",
    "docs/c.md",
    "docs/keras.md",
    "docs/learned-bits.md",
    "docs/linen.md",
    "docs/onnx.md",
    "docs/other-libraries.md",
    "docs/own-study.md",
    "docs/reading.md",
    "docs/report.md",
    "docs/executorch.md",
    "docs/rtl.md",
    "docs/stablehlo.md",
    "docs/target-rules.md",
    "docs/tflite.md",
    "docs/training-loop.md",
    *NAMES,
)
BLOCK = re.compile(r"^```(python|c|sh)\n(.*?)^```", flags=re.M | re.S)
LEFT = {
    "README.md": {"model.qjax", "model.tflite", "firmware", "report.html"},
    "docs/index.md": {"model.qjax", "model.tflite", "firmware", "report.html"},
    "docs/binary.md": {"firmware"},
    "docs/c.md": {"net", "output.txt"},
    "docs/dynamic.md": {"model.tflite"},
    "docs/float-models.md": {"model.onnx", "model.tflite"},
    "docs/gallery.md": {"firmware", "vit.onnx", "language-model.qjax", "circuit.onnx"},
    "docs/own-study.md": {"my_ties.md", "my_ties.json", "my_ties.png", "ties.jsonl", "ties.csv"},
    "docs/report.md": {"report.html", "two.html"},
}
"""What running a page leaves behind."""
ELSEWHERE = {
    "docs/backends.md": {1},  # a sketch with "..."; experiments/accelerator.py is whole
    "docs/float-models.md": {0, 2, 3},  # torch and TensorFlow are not installed; tests/cli/test_quantize.py
    "docs/executorch.md": {1},  # tests/contrib/executorch/test_oracle_pte.py
    "docs/rtl.md": {1, 2},  # tests/contrib/rtl/test_oracle_rtl.py
    "docs/learned-bits.md": {1},  # a study of an hour, tests/experiments/test_learned_bits.py
    "docs/onnx.md": {1, 2},  # tests/contrib/onnx_styles/test_oracle_openvino_codes.py and test_oracle_qonnx.py
    "docs/precision.md": {1},  # a study of minutes
    "docs/profiles.md": {1},  # tests/cli
}
"""Page -> the numbers of the blocks that do not run here."""


SLOW = (
    "docs/gallery.md",
    "docs/keras.md",
    "docs/learned-bits.md",
    "docs/targets.md",
    "docs/training.md",
    "docs/training-loop.md",
)

OF_XLA = ("docs/training-loop.md",)
"""Pages that compare a step under jit with the same step elsewhere, to the bit."""


def _marks(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.exhaustive] * (page in SLOW) + [pytest.mark.compiled] * (page in OF_XLA)


@pytest.mark.parametrize("page", [pytest.param(p, marks=_marks(p)) for p in PAGES])
@pytest.mark.sampled(3)
def test_a_page_runs(page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order, in one folder: Python in one namespace, a C file under the name in its first line."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert any(kind == "python" for kind, _ in blocks)
    names: dict[str, object] = {"__name__": page}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names |= NAMES.get(page, dict)()
    for number, (kind, text) in enumerate(blocks):
        if number in ELSEWHERE.get(page, ()):
            continue
        if kind == "python":
            # a user's process has jax's default promotion rules; optax relies on them
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                exec(compile(text, page, "exec"), names)
        elif kind == "c":
            name = re.match(r"/\* (\w+\.c) \*/\n", text)
            assert name is not None
            (tmp_path / name[1]).write_text(text)
        else:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            for line in re.findall(r"# (.*codes differ)$", text, flags=re.M):
                assert line in done.stdout
    assert LEFT.get(page, set()) <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.exhaustive
def test_the_page_on_several_devices_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.page_on_devices"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
