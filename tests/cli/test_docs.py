"""Every output on the page of the command line is what the command prints."""

import re

import pytest

from tests.cli import docs


def without_sizes(text: str) -> str:
    """Sizes of files and code change with what writes them."""
    return re.sub(r"[\d,]+ bytes", "N bytes", re.sub(r" +$", "", text, flags=re.M))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_page_shows_what_the_commands_print():
    text = docs.PAGE.read_text()
    assert len(docs.BLOCK.findall(text)) >= 7
    assert without_sizes(docs.in_folder(lambda: docs.rewritten(text))) == without_sizes(text)
