"""A hook of MkDocs: the footer says which version of qjax the site describes.

With QJAX_VERSIONS set, as tools/site-versions.sh does, the header offers the other versions that lie beside it.
"""

import os
import re
from pathlib import Path
from typing import Any

VERSION = Path(__file__).parents[1] / "qjax" / "support" / "version.py"


def on_config(config: Any) -> Any:
    found = re.search(r'__version__ = "(.*)"', VERSION.read_text())
    assert found is not None
    config.copyright = f"qjax {found[1]}"
    if os.environ.get("QJAX_VERSIONS"):
        config.extra["version"] = {"provider": "mike"}
    return config
