"""Writes docs/matrix.txt and the tables of docs/targets.md from a run of the matrix: python tools/matrix-docs.py."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def output(*module: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", *module]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


matrix = output("conformance")
(DOCS / "matrix.txt").write_text(matrix + "\n", encoding="utf-8")
summary = matrix.rsplit("\n\n", 1)[1]
page = (DOCS / "targets.md").read_text(encoding="utf-8")
for name, text in (("summary", summary), ("list", output("qjax", "targets"))):
    block = f"<!-- {name} -->\n```\n{text}\n```\n<!-- end -->"
    page, found = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, page, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"docs/targets.md: expected one block <!-- {name} -->, found {found}")
(DOCS / "targets.md").write_text(page, encoding="utf-8")
