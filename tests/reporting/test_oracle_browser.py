"""Reports in Chromium: clicks, search, keys, no errors on the console, no violation that axe finds.

Needs Chromium, Node and the packages of tools/report (`npm ci` there); the screenshots stay in out/report.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import qjax
from tests.cli import models
from tests.reporting.models import data, quantized

TOOLS = Path(__file__).parents[2] / "tools" / "report"
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.mark.oracle
def test_pages_in_a_browser(tmp_path):
    if BROWSER is None or shutil.which("node") is None or not (TOOLS / "node_modules").is_dir():
        pytest.skip("needs chromium, node, and `npm ci` in tools/report")
    network = models.network()
    images = np.random.default_rng(0).uniform(-1, 1, (8, 8, 8, 1)).astype(np.float32)
    pages = [
        qjax.report(quantized(), [data()], tmp_path / "model.html"),
        qjax.report(network, [images], tmp_path / "graph.html"),
        qjax.report((network, network.retarget("tflite_xnnpack")), [images], tmp_path / "pair.html"),
    ]
    shots = TOOLS.parents[1] / "out" / "report"
    done = subprocess.run(
        ["node", "look.mjs", shots, *pages],
        cwd=TOOLS,
        env={**os.environ, "CHROMIUM": BROWSER},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
