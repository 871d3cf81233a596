"""The tutorials as notebooks: `python -m experiments.notebooks FOLDER` writes one .ipynb for each page.

Code, outputs and pictures are those of the page, so nothing runs and nothing but Python is needed. `make site` puts the
notebooks beside the pages.
"""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "tutorials"
FENCE = re.compile(r"(^```\w*\n.*?^```\n)", flags=re.M | re.S)
RUNS = ("python", "sh", "c")
"""The kinds of blocks that run. What they print is the block of kind `text` behind them."""
PICTURE = re.compile(r"!\[([^\]]*)\]\(([\w-]+\.png)\)")


def parts_of(text: str) -> list[tuple[str, str]]:
    """(kind, content) of every block, and ("", prose) of what lies between."""
    found: list[tuple[str, str]] = []
    for part in FENCE.split(text):
        if not part.startswith("```"):
            found.append(("", part))
            continue
        opening, _, rest = part.partition("\n")
        found.append((opening[3:], rest[: -len("```\n")]))
    return found


def notebook(text: str) -> dict[str, Any]:
    """A page as a notebook of format 4: blocks that run are cells of code, with what they print."""
    cells: list[dict[str, Any]] = []
    for kind, content in parts_of(re.sub(r"<!--.*?-->", "", text, flags=re.S)):
        if kind == "text" and cells and cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": content}]
        elif kind in RUNS:
            cells.append({"cell_type": "code", "source": _source(kind, content), "outputs": [], "metadata": {}})
            cells[-1]["execution_count"] = None
        elif kind:
            cells.append({"cell_type": "markdown", "source": f"```{kind}\n{content}```", "metadata": {}})
        elif content.strip():
            cells.append(_prose(content.strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _source(kind: str, content: str) -> str:
    if kind == "sh":
        return f"%%bash\n{content.rstrip()}"
    if kind == "c":
        name = re.match(r"/\* (\w+\.c) \*/\n", content)
        assert name is not None, "the first line of a block of C names its file: /* main.c */"
        return f"%%writefile {name[1]}\n{content.rstrip()}"
    return content.rstrip()


def _prose(content: str) -> dict[str, Any]:
    """A cell of text that holds its pictures."""
    attached: dict[str, Any] = {}
    for name in {name for _, name in PICTURE.findall(content)}:
        attached[name] = {"image/png": base64.b64encode((PAGES / name).read_bytes()).decode()}
    source = PICTURE.sub(r"![\1](attachment:\2)", content)
    cell: dict[str, Any] = {"cell_type": "markdown", "source": source, "metadata": {}}
    return cell | ({"attachments": attached} if attached else {})


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        if page.stem != "README":
            made = json.dumps(notebook(page.read_text()), indent=1)
            (folder / f"{page.stem}.ipynb").write_text(made + "\n")


if __name__ == "__main__":
    main()
