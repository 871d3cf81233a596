"""The documentation is what it promises to be: short, plain, linked, and its messages are those of the code."""

import re
import types
from pathlib import Path

import jax
import pytest

import qjax

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PLAIN = """
    README.md CONTRIBUTING.md index comparison coming-from faq figures experiments/README
    tutorials/README tutorials/first-qat tutorials/transformer-onnx tutorials/keyword-spotting tutorials/two-runtimes
    tutorials/int4-language-model tutorials/own-rounding tutorials/rounding-bias
    how-to/target how-to/lost-accuracy how-to/convert how-to/train
    training own-training precision integers dynamic accuracy compare compare-example targets inputs-outputs backends
    onnx tflite c stablehlo reading distributed linen command-line first-calls language-models
    api glossary report benchmarks primitives architectures accuracy-real
    experiments/ties experiments/double_rounding experiments/depth experiments/trainer_precision
    experiments/accumulators experiments/stochastic experiments/oscillations
    experiments/learned_rounding experiments/pooling
"""
"""The pages whose sentences are short; names without an ending are of docs/."""
NEW = [name if name.endswith(".md") else f"docs/{name}.md" for name in PLAIN.split()]


def prose(text: str) -> list[str]:
    """The sentences of a page: without code, tables and the addresses of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#+|[-*]|\d+\.)\s", "\n\n", text, flags=re.M)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [s for part in paragraphs for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"0-9\[])", part) if s]


def words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    assert len(words(text)) <= 900
    assert (ROOT / "docs/figures/report.png").stat().st_size < 400_000


@pytest.mark.parametrize("page", NEW)
def test_no_sentence_is_long(page):
    long = [s for s in prose((ROOT / page).read_text()) if len(words(s)) > 25]
    assert long == []


def test_every_link_leads_somewhere():
    lost: list[str] = []
    for page in [ROOT / "README.md", *PAGES]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)\s#]+)", text):
            if not (page.parent / link).exists():
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []


@pytest.mark.exhaustive
def test_the_navigation_names_every_page():
    named = set(re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    found = {str(page.relative_to(ROOT / "docs")) for page in PAGES}
    assert named == found


@pytest.mark.exhaustive
def test_the_reference_names_every_public_name():
    shown = {
        line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), flags=re.M)
    }
    modules = {name for name in qjax.__all__ if isinstance(getattr(qjax, name), types.ModuleType)}
    assert set(qjax.__all__) - modules - shown == set()
    assert {"calibration", "training"} <= shown


def test_messages_are_those_of_the_code():
    """Each block of Python in the page is followed by the start of the message that it raises."""
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", (ROOT / "docs/faq.md").read_text(), flags=re.M | re.S)
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(blocks[0][1], names)
        pairs = list(zip(blocks[1::2], blocks[2::2], strict=True))
        assert len(pairs) >= 8
        for (kind, code), (other, said) in pairs:
            assert (kind, other) == ("python", "text")
            with pytest.raises((TypeError, ValueError)) as error:
                exec(code, names)
            assert str(error.value).startswith(said.strip()), str(error.value)
