"""The tutorials show what their code prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import notebooks, tutorials

STAMP = "\n<!-- python -m experiments.tutorials wrote the outputs: {}, here -->\n"


@pytest.mark.parametrize("name", tutorials.names())
def test_the_outputs_belong_to_the_code(name: str) -> None:
    """Who edits the code of a page runs it again: `python -m experiments.tutorials NAME`."""
    assert tutorials.is_stamped((tutorials.PAGES / f"{name}.md").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", tutorials.names())
def test_a_page_shows_what_its_code_prints(name: str) -> None:
    """In a process of its own: a page may register a target."""
    command = [sys.executable, "-m", "experiments.tutorials", name, "--check"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_elsewhere_numbers_and_rare_causes_may_differ() -> None:
    frequent = "  softmax (2 nodes), 3,090 codes by at most 1: computes softmax as softmax of onnx\n"
    rare = "  dot (blocks/layers/1/attention/out), 2 codes by at most 1: rounds a float32 product once, ties to even\n"
    here, elsewhere = f"{frequent}{rare}Cure\n", f"{frequent.replace('3,090', '2,411')}Cure\n"
    assert tutorials.comparable(here, same_place=False) == tutorials.comparable(elsewhere, same_place=False)
    assert tutorials.comparable(here, same_place=True) == here
    for other in (f"{rare}Cure\n", f"{frequent.replace('onnx', 'tflite')}Cure\n"):
        assert tutorials.comparable(here, same_place=False) != tutorials.comparable(other, same_place=False)


def test_a_page_as_a_notebook() -> None:
    page = (notebooks.PAGES / "keyword-spotting.md").read_text()
    made = notebooks.notebook(page)
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert len(code) == len(re.findall(r"^```(python|sh|c)$", page, flags=re.M))
    assert sum(bool(cell["outputs"]) for cell in code) == len(re.findall(r"^```text$", page, flags=re.M))
    assert any(cell["source"].startswith("%%writefile") for cell in code)
    assert [name for cell in made["cells"] for name in cell.get("attachments", {})] == ["keyword-spotting-sounds.png"]


def test_an_output_that_is_edited_by_hand_is_found() -> None:
    page = "# A page\n\n```python\nprint(1 + 1)\n```\n"
    written = tutorials.executed(page, "page")
    assert written == page + "\n```text\n2\n```\n"
    assert tutorials.executed(written, "page") == written
    stamped = written + STAMP.format(tutorials.digest(written))
    assert tutorials.is_stamped(stamped)
    assert not tutorials.is_stamped(stamped.replace("\n2\n", "\n3\n"))
