"""The long description and the addresses of the distribution, made while it is built.

QJAX_REPOSITORY (such as https://github.com/OWNER/NAME, which the workflow of releases sets) makes links of README.md
absolute and names the project's addresses. Without it links stay relative, which is right for a build at home.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """The text with links to files of the repository as addresses: pictures raw, everything else as a page."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({repository}/{kind}/{ref}/{match[3]})"

    return LINK.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, object]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("QJAX_REPOSITORY", "").rstrip("/")
        urls: dict[str, str] = {}
        if repository:
            text = absolute(text, repository, os.environ.get("QJAX_REF", "main"))
            urls = {
                "Repository": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls
