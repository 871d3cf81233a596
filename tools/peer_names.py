"""docs/coming-from.md: are the names of other tools still names of these tools?

    pip install --no-deps --target FOLDER qwix aqtp tensorflow-model-optimization torchao brevitas aimet-torch qkeras
    python tools/peer_names.py FOLDER

Reads every name in the left columns of the tables and looks for it in the sources of the tool, which are parsed and not
run. Writes the counts into the page. Exits with 1 if a name is not found.
"""

import ast
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
PEERS = {
    "qwix": ("qwix", "qwix"),
    "AQT": ("aqtp", "aqt"),
    "TFMOT and the TFLite converter": ("tensorflow-model-optimization", "tensorflow_model_optimization"),
    "PyTorch and torchao": ("torchao", "torchao"),
    "Brevitas": ("brevitas", "brevitas"),
    "AIMET": ("aimet-torch", "aimet_torch"),
    "QKeras and HGQ": ("qkeras", "qkeras"),
}
"""Section -> its package on PyPI and the folder of its sources."""
NOT_OF_THE_PACKAGE = {"TFLiteConverter", "Optimize", "DEFAULT", "representative_dataset", "fit", "hls4ml", "ap_fixed"}
"""Names of TensorFlow, Keras and hls4ml."""
WORDS = {"True", "False", "None"}


def left_columns(text: str) -> dict[str, set[str]]:
    """Section -> the names in code in the first cells of its rows."""
    found: dict[str, set[str]] = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title = section.partition("\n")[0]
        cells = re.findall(r"^\| ([^|]*) \|", section, flags=re.M)
        code = [re.sub(r"\"[^\"]*\"", "", span) for cell in cells for span in re.findall(r"`([^`]*)`", cell)]
        found[title] = {name for span in code for name in re.findall(r"[A-Za-z_]\w*", span)} - WORDS
    return found


def names_in(folder: Path) -> set[str]:
    """The classes, functions, parameters, attributes, variables and keywords of all modules."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
            for field in ("name", "id", "arg", "attr"):
                if isinstance(value := getattr(node, field, None), str):
                    found.add(value)
    return found


def version_of(folder: Path, package: str) -> str:
    (info,) = (f for f in folder.glob("*.dist-info") if f.name.lower().startswith(package.replace("-", "_") + "-"))
    return info.name.removesuffix(".dist-info").rpartition("-")[2]


def main(folder: Path) -> int:
    text = PAGE.read_text()
    rows, lost = list[str](), 0
    for section, names in left_columns(text).items():
        if section not in PEERS:
            continue
        package, sources = PEERS[section]
        asked = names - NOT_OF_THE_PACKAGE
        missing = sorted(asked - names_in(folder / sources))
        lost += len(missing)
        listed = ", ".join(f"`{name}`" for name in missing) or "none"
        rows.append(f"| {section} | `{package}` | {version_of(folder, package)} | {len(asked)} | {listed} |\n")
        print(rows[-1], end="")
    head = "| tool | package | version | names | not found |\n| --- | --- | --- | --- | --- |\n"
    PAGE.write_text(re.sub(re.escape(head) + r"(\|.*\n)+", head + "".join(rows), text))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
