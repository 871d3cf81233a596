"""The picture of README.md, docs/figures/report.png: `make report-picture` (needs Chromium and Node).

A ResNet-20 with random weights, so that no training is needed: the picture shows the page, not an accuracy.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
from flax import nnx

import qjax
from experiments.models.resnet import CifarResNet

HERE = Path(__file__).parent


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (16, 16, 16, 3))
    recipe = qjax.Recipe(target="tflite_micro", weights=qjax.QSpec(bits=4, axis=-1), first_last_bits=8)
    qmodel = qjax.quantize(CifarResNet(1, 8, rngs=nnx.Rngs(0)), recipe, x)
    qmodel.eval()
    with tempfile.TemporaryDirectory() as folder:
        page = qjax.report(qmodel, [x], Path(folder) / "picture.html", title="ResNet for tflite_micro, 4-bit weights")
        shots = Path(folder) / "shots"
        size = {**os.environ, "WIDTH": "1280", "HEIGHT": "1180"}
        subprocess.run(["node", "look.mjs", shots, page], cwd=HERE, env=size, check=True)
        target = HERE.parents[1] / "docs" / "figures" / "report.png"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(shots / "picture-light.png", target)
        print(target, target.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
