"""The documentation is what it promises to be: readable, linked, and its messages are those of the code."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + PAGES
LONGEST = 35
"""Words of a sentence. The limit only stops sentences that run away: it must not split a cause from its effect."""
QUOTED = re.compile(r"\*\*Said[\s\S]*?(?=\n\n)|: ConversionError: .*|^Versions: .*|^- keras .*", flags=re.M)
"""What is not ours to word, or no sentence: quotations, messages, lists of versions and of models."""
DIALECT = ("leaves as", "leave as", "stands on", "stand on", "reals", "the house")
"""Words of this project alone."""


def prose(text: str) -> list[str]:
    """The sentences of a page: without code, tables, entries of the reference and the addresses of links."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    text = QUOTED.sub("", re.sub(r"^(\||:::|    options:).*$", "", text, flags=re.M))
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


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_sentences_end_and_use_the_words_of_the_field(page: Path):
    for sentence in prose(page.read_text()):
        told = re.sub(r"`[^`]*`", "x", sentence)
        assert len(words(sentence)) <= LONGEST, sentence
        assert not [word for word in DIALECT if re.search(rf"\b{word}\b", told)], sentence


def test_the_search_for_sentences_finds_them():
    assert prose("One. Two is `a.b`!\n\n| 1 |\n\n- three\n") == ["One.", "Two is `a.b`!", "three"]


def test_every_link_leads_somewhere():
    lost: list[str] = []
    for page in [ROOT / "README.md", *PAGES]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)\s#]+)", text):
            if not (page.parent / link).exists():
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []


def test_every_anchor_is_a_heading():
    """Pages with entries of the reference have anchors of their own (`::: name`), which only the site's build knows."""
    lost: list[str] = []
    for page in [ROOT / "README.md", *PAGES]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for path, anchor in re.findall(r"\]\((?!https?://|mailto:)([^)\s#]*)#([^)\s]+)\)", text):
            linked = (page.parent / path if path else page).read_text()
            if ":::" not in linked and anchor not in anchors(linked):
                lost.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert lost == []


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as Python-Markdown forms them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.exhaustive
def test_the_navigation_names_every_page():
    named = set(re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    found = {str(page.relative_to(ROOT / "docs")) for page in PAGES}
    assert named == found


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
