"""Simulates the emitted Verilog with Icarus Verilog."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib import rtl
from qjax.contrib.rtl.project import buses, clocks
from qjax.runtimes import Run
from qjax.runtimes.batches import batch_axis

_BENCH = """`timescale 1 ns / 1 ps
module bench;
    reg clk = 0;
    reg [INTO:0] x;
    wire [OUT:0] y;
    reg [INTO:0] given [0:LAST];
    integer i;
    model_wrapper circuit (CLOCK.model_inp(x), .model_out(y));
    initial begin
        $readmemh("given.hex", given);
        for (i = 0; i <= LAST + WAIT; i = i + 1) begin
            x = given[i <= LAST ? i : LAST];
            #1;
            if (i >= WAIT) $display("%h", y);
            #1 clk = 1;
            #1 clk = 0;
        end
        $finish;
    end
endmodule
"""


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Build a simulation that takes the examples of a batch one after another.

    Raises:
      FileNotFoundError: Icarus Verilog is not installed. ValueError: the language is not Verilog. RuntimeError: the
        simulator fails.
    """
    if (language := options.get("language", "verilog")) != "verilog":
        raise ValueError(f"verify: expected Verilog for the runtime verilog, got options for {language!r}.")
    if shutil.which("iverilog") is None or shutil.which("vvp") is None:
        raise FileNotFoundError("Icarus Verilog is not installed: expected its programs iverilog and vvp on the PATH.")
    circuit, files = rtl.build(graph.ir, **{**options, "name": "model", "vectors": 0})
    into, out = buses(circuit)
    wait = clocks(options.get("stages", 0))
    sources = [name for name in sorted(files) if name.startswith("src/") and name.endswith(".v")]
    for name in sources:
        os.makedirs(os.path.join(folder, os.path.dirname(name)), exist_ok=True)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(files[name])
    axes = {name: batch_axis(graph.ir.tensors[name]) for name in (*graph.ir.inputs, *graph.ir.outputs)}
    count = batch if any(axes[name] is not None for name in graph.ir.inputs) else 1
    values = {"INTO": into.bits - 1, "OUT": out.bits - 1, "LAST": count - 1, "WAIT": wait}
    bench = _BENCH.replace("CLOCK", ".clk(clk), " if wait else "")
    for name, value in values.items():
        bench = bench.replace(name, str(value))
    with open(os.path.join(folder, "bench.v"), "w", encoding="ascii") as file:
        file.write(bench)
    _run(["iverilog", "-g2012", "-o", "bench.vvp", *sources, "bench.v"], folder)

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = list[np.ndarray]()
        for name, x in zip(graph.ir.inputs, arrays, strict=True):
            axis = axes[name]
            # An input without a batch axis is the same for all examples.
            rows = np.broadcast_to(x, (count, *x.shape)) if axis is None else np.moveaxis(x, axis, 0)
            parts.append(rows.reshape(count, -1))
        with open(os.path.join(folder, "given.hex"), "w", encoding="ascii") as file:
            file.writelines(f"{into.packed([part[row] for part in parts]):x}\n" for row in range(count))
        lines = [line.strip() for line in _run(["vvp", "bench.vvp"], folder).splitlines() if line.strip()]
        codes = np.array([out.codes(int(row, 16)) for row in lines], np.int64).reshape(count, -1)
        found, first = list[np.ndarray](), 0
        for port in circuit.outputs:
            size = int(np.prod(port.shape))
            taken = codes[:, first : first + size].astype(port.dtype)
            axis = axes[port.name]
            if axis is None:
                found.append(taken[0].reshape(port.shape))
            elif count > 1 and port.shape[axis] != 1:
                raise ValueError(
                    f"verify: output {port.name!r} has {port.shape[axis]} rows for each example, and Verilog cannot "
                    "tell their order among several examples. Use a batch of 1."
                )
            else:
                found.append(np.concatenate(list(taken.reshape(count, *port.shape)), axis))
            first += size
        return found

    return run


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} fails on the emitted Verilog:\n{done.stderr or done.stdout}")
    return done.stdout
