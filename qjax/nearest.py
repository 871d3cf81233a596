"""The known name that a mistyped one is nearest to."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, to follow an error's sentence, or "" where nothing is near."""
    if not isinstance(name, str):
        return ""
    names = list(known)
    folded = {one.lower().replace("-", "_"): one for one in names}
    plain = name.lower().replace("-", "_")
    found = difflib.get_close_matches(plain, folded, n=1, cutoff=0.6)
    # By letters "micro" is far from "tflite_micro", but it is a part of it.
    parts = [one for key, one in folded.items() if len(plain) > 2 and plain in key]
    best = folded[found[0]] if found else parts[0] if len(parts) == 1 else None
    return "" if best is None else f" Did you mean {best!r}?"
