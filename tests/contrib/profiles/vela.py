"""What Vela says of a .tflite file: which operators it leaves to the CPU, and why."""

import dataclasses
import os
import re
import subprocess
import sys

ACCELERATOR = "ethos-u55-256"

EXTRA = {
    "products": "int32 products without a scale, which the profile does not know",
}
"""Single operators that the profile refuses and Vela takes, with the reason. None is the other way round."""


@dataclasses.dataclass(frozen=True)
class Report:
    """cpu, npu: how many operators of its own each side has. reasons: its words about those of the CPU."""

    cpu: int
    npu: int
    reasons: tuple[str, ...]


def compiled(data: bytes, folder: str) -> Report:
    """Run Vela on a file's bytes.

    It compiles no file with an operation that it can neither run nor pass on, and says so: one operator for the CPU.
    """
    path = os.path.join(folder, "model.tflite")
    with open(path, "wb") as file:
        file.write(data)
    command = [sys.executable, "-m", "ethosu.vela", path, "--output-dir", folder, "--accelerator-config", ACCELERATOR]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "could not run on NPU" in done.stderr:
        return Report(1, 0, (done.stderr.strip().splitlines()[-1],))
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    counts = [re.search(rf"{side} operators = (\d+)", text) for side in ("CPU", "NPU")]
    assert all(counts), text
    cpu, npu = (int(found.group(1)) for found in counts if found is not None)
    return Report(cpu, npu, tuple(line for line in text.splitlines() if line.startswith("Reason: ")))
