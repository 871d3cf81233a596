"""Vela itself on the files: single operations, and a network that the profile takes and one that it does not.

    python -m pytest --oracles -m oracle tests/contrib/profiles/test_oracle_vela.py

With QJAX_RECORD=1 it writes the recording that `make test` compares with.
"""

import importlib.metadata
import json
import os

import pytest

import qjax
from qjax import Recipe
from qjax.contrib.profiles.contents import check_file
from qjax.export.emit.tflite import to_bytes
from tests.contrib.profiles import vela
from tests.contrib.profiles.networks import IMAGES, ROWS, Chain, Gelu, Residual, Softmax
from tests.contrib.profiles.single import files
from tests.contrib.profiles.test_vela import RECORDED


@pytest.mark.oracle
def test_single_operations(tmp_path):
    reports = {name: vela.compiled(data, str(tmp_path)) for name, data in files().items()}
    entries = {name: {"cpu": r.cpu, "npu": r.npu, "reasons": r.reasons} for name, r in reports.items()}
    passing = sum(report.cpu == 0 for report in reports.values())
    document = {
        "vela": importlib.metadata.version("ethos-u-vela"),
        "accelerator": vela.ACCELERATOR,
        "count": len(entries),
        "passing": passing,
        "files": entries,
    }
    text = json.dumps(document, indent=1) + "\n"
    if os.environ.get("QJAX_RECORD"):
        RECORDED.write_text(text, encoding="utf-8")
    assert json.loads(text) == json.loads(RECORDED.read_text(encoding="utf-8"))
    differ = {n for n, data in files().items() if check_file(data, "ethos_u").passes != (reports[n].cpu == 0)}
    assert differ == set(vela.EXTRA)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [Chain, Residual, Softmax, Gelu])
def test_networks(kind, tmp_path):
    sample = IMAGES if kind in (Chain, Residual) else ROWS
    graph = qjax.convert(qjax.quantize(kind(), Recipe(target="tflite_micro"), sample), sample)
    report = vela.compiled(to_bytes(graph.ir, batch=1), str(tmp_path))
    assert (report.cpu == 0) == graph.check("ethos_u").passes == (kind is not Gelu)
    assert report.npu > 0
