"""Detects a conflict of installed packages: another project owns the name qjax on PyPI; this one is qjax-quant."""

import os

DISTRIBUTION = "qjax-quant"


def conflict(folder: str) -> str | None:
    """Describe the conflict if the `qjax` of PyPI, a library for Tsallis statistics, is in the same folder; else None.

    Both packages install files under `qjax/`, so the later one overwrites the earlier one's.

    Args:
      folder: where packages are installed; by default, the folder of this package.
    """
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    others = [name for name in entries if name.startswith("qjax-") and name.endswith((".dist-info", ".egg-info"))]
    if not others:
        return None
    return (
        f"{folder}: {others[0]} is installed beside {DISTRIBUTION}. Both own the folder qjax/ and overwrite each "
        f"other's files. The qjax of PyPI is another project, on Tsallis statistics. Cure: uninstall both, then "
        f"install one: python -m pip uninstall qjax {DISTRIBUTION}"
    )


def own_folder() -> str:
    """The folder that contains this package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
