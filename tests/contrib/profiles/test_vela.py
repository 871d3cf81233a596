"""The profile `ethos_u` against what Vela 5.2.0 answered, recorded by test_oracle_vela.py."""

import json
from pathlib import Path

from qjax.contrib.profiles.contents import check_file
from tests.contrib.profiles import vela
from tests.contrib.profiles.single import files

RECORDED = Path(__file__).with_name("vela.json")


def test_the_profile_agrees_with_the_recording():
    """Every operator on the NPU, or at least one left to the CPU: single operations, all that have a file."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    found = files()
    assert set(recorded["files"]) == set(found)
    passes = {name: check_file(data, "ethos_u").passes for name, data in found.items()}
    differ = {name: own for name, own in passes.items() if own != (recorded["files"][name]["cpu"] == 0)}
    assert differ == dict.fromkeys(vela.EXTRA, False)
    passing = sum(entry["cpu"] == 0 for entry in recorded["files"].values())
    assert (len(found), passing) == (recorded["count"], recorded["passing"])
