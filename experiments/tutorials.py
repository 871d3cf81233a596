"""The tutorials of the documentation: run their code, and write what it printed and drew into the pages.

`python -m experiments.tutorials` runs every page of docs/tutorials, each in its own process and in an empty folder.
Names run some pages only. `--check` writes nothing. It exits with 1 if a page does not show what its code prints.
On the CPU, Python and jax that a page names, all of its outputs are compared; elsewhere their words.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from experiments.notebooks import PAGES, RUNS, parts_of
from qjax.contrib.lab.machine import machine

TIME = re.compile(r"^\*It takes about .*\*$", flags=re.M)
RARE_CAUSE = re.compile(r"^  \w+ \([^\n]*\), \d\d? codes by at most \d+: [^\n]*\n", flags=re.M)
STAMP = re.compile(r"\n<!-- python -m experiments\.tutorials wrote the outputs: (\w+), (.*) -->\n\Z")


def names() -> list[str]:
    """The tutorials, by the names of their files."""
    return sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "README")


def without_outputs(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The page without the outputs that follow a block that runs."""
    kept: list[tuple[str, str]] = []
    for kind, content in parts:
        if kind == "text" and kept[-1] == ("", "\n") and kept[-2][0] in RUNS:
            kept.pop()
        else:
            kept.append((kind, content))
    return kept


def place() -> str:
    """What float training depends on."""
    found = machine()
    return f"{found['cpu']}, jax {found['jax']}, Python {found['python']}"


def digest(text: str) -> str:
    """A digest of the blocks that run and of their outputs."""
    blocks = [f"{kind}\n{content}" for kind, content in parts_of(text) if kind in (*RUNS, "text")]
    return hashlib.sha256("\n".join(blocks).encode()).hexdigest()[:16]


def is_stamped(text: str) -> bool:
    """Whether the command wrote the outputs of exactly this code."""
    found = STAMP.search(text)
    return found is not None and found[1] == digest(text)


def run_block(kind: str, content: str, names: dict[str, object], page: str) -> str:
    """What the block prints. A block of C becomes the file that its first line names."""
    if kind == "c":
        name = re.match(r"/\* (\w+\.c) \*/\n", content)
        assert name is not None, "the first line of a block of C names its file: /* main.c */"
        Path(name[1]).write_text(content)
        return ""
    if kind == "sh":
        command = ["bash", "-euo", "pipefail", "-c", content]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    printed = io.StringIO()
    # a user's process has jax's default promotion rules; the tests have stricter ones
    standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with standard[0], standard[1], contextlib.redirect_stdout(printed):
        exec(compile(content, page, "exec"), names)
    return printed.getvalue()


def executed(text: str, page: str) -> str:
    """The page with the outputs of this run, which happens in the present folder."""
    names: dict[str, object] = {"__name__": page}
    written: list[str] = []
    for kind, content in without_outputs(parts_of(text)):
        if not kind:
            written.append(content)
            continue
        written.append(f"```{kind}\n{content}```\n")
        if kind in RUNS and (printed := run_block(kind, content, names, page)):
            lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
            written.append(f"\n```text\n{lines}```\n")
    return "".join(written)


def rerun(name: str, pictures: Path | None) -> str:
    """The page after a run in an empty folder; the pictures that it shows are copied into `pictures`."""
    text = STAMP.sub("", (PAGES / f"{name}.md").read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = executed(text, name)
        if pictures is not None:
            for picture in re.findall(r"!\[[^\]]*\]\(([\w-]+\.png)\)", text):
                shutil.copy(picture, pictures)
    return text


def write(name: str) -> None:
    """Run a page and write its outputs, its pictures, the time that it took and its stamp."""
    text = rerun(name, PAGES)
    used = os.times()
    seconds = 5 * round((used.user + used.system + used.children_user + used.children_system) / 5)
    text = TIME.sub(f"*It takes about {seconds} seconds of processor time.*", text)
    text += f"\n<!-- python -m experiments.tutorials wrote the outputs: {digest(text)}, {place()} -->\n"
    (PAGES / f"{name}.md").write_text(text)


def comparable(text: str, same_place: bool) -> str:
    """The page without its stamp. Float training differs between CPUs, so elsewhere only the words are compared.

    Elsewhere a cause of fewer than 100 codes is left out: the weights decide which nodes round so rarely otherwise.
    """
    text = STAMP.sub("", text)
    if same_place:
        return text
    text = RARE_CAUSE.sub("", text)
    text = re.sub(r"[-+]?[\d,]*\.?\d+(e-?\d+)?", "#", text)  # the width of a number moves the rest of a table
    return re.sub(r"  +|--+", " ", text)


def differences(name: str) -> list[tuple[str, str]]:
    """(what the page shows, what its code prints now) of every line that differs."""
    text = (PAGES / f"{name}.md").read_text()
    found = STAMP.search(text)
    same_place = found is not None and found[2] == place()
    shown, printed = (comparable(page, same_place).splitlines() for page in (text, rerun(name, None)))
    return [(a, b) for a, b in itertools.zip_longest(shown, printed, fillvalue="") if a != b]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", help="pages of docs/tutorials; none means all")
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args(argv)
    chosen = args.names or names()
    if len(chosen) > 1:  # processes of their own: compiled functions, memory and time are one page's
        root, options = Path(__file__).parents[1], ["--check"] if args.check else []
        commands = [[sys.executable, "-m", "experiments.tutorials", name, *options] for name in chosen]
        return max(subprocess.run(command, cwd=root, check=False).returncode for command in commands)
    (name,) = chosen
    start = time.perf_counter()
    found: list[tuple[str, str]] = []
    if args.check:
        found = differences(name)
    else:
        write(name)
    for shown, printed in found:
        print(f"{name}: shows   {shown}\n{' ' * len(name)}  prints  {printed}")
    print(f"{name}: {time.perf_counter() - start:.0f} s" + (f", {len(found)} lines differ" if args.check else ""))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
