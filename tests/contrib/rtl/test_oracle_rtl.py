"""Icarus Verilog and GHDL simulate the emitted circuits, and what Yosys synthesizes of one.

python -m pytest --oracles -m oracle tests/contrib/rtl/test_oracle_rtl.py
"""

import subprocess
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.rtl import verilog
from tests.contrib.onnx_styles.qonnx_networks import NETWORKS, graph_of
from tests.contrib.rtl.rtl_networks import Dense, Kinds, Recurrent, Residual, converted, for_fpga, with_learned_bits

GRAPHS = {
    "rows": lambda: graph_of("rows", "w4a4"),
    "images": lambda: graph_of("images", "ternary"),
    "recurrent": lambda: for_fpga(Recurrent),
    "kinds": lambda: for_fpga(Kinds),
    "learned_bits": lambda: with_learned_bits(4.0),
    "tflite_micro": lambda: converted(Residual, target="tflite_micro"),
    "torch_fbgemm": lambda: converted(Dense, target="torch_fbgemm"),
}


@pytest.mark.oracle
@pytest.mark.parametrize("language", ["verilog", "vhdl"])
@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_testbench_passes(name, stages, language, tmp_path):
    GRAPHS[name]().emit("rtl", tmp_path, name="net", language=language, stages=stages)
    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "net: 0 of 16 examples differ" in done.stdout + done.stderr


CELLS = "/usr/share/yosys/xilinx/cells_sim.v"
"""What the cells of a Xilinx netlist compute; Yosys brings it."""


@pytest.mark.oracle
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("target", ["fpga", "onnxruntime"])
def test_the_netlist_for_xilinx_passes(target, stages, tmp_path):
    graph = for_fpga(Dense) if target == "fpga" else converted(Dense, target=target)
    graph.emit("rtl", tmp_path, name="net", stages=stages)
    steps = [
        "read_verilog -sv src/*.v src/static/*.v",
        "synth_xilinx -flatten -noiopad -top net_wrapper",
        "write_verilog -noattr netlist.v",
    ]
    subprocess.run(["yosys", "-q", "-p", "; ".join(steps)], cwd=tmp_path, check=True)
    assert "LUT6" in (tmp_path / "netlist.v").read_text()
    sources = ["netlist.v", CELLS, "net_test.v"]
    subprocess.run(["iverilog", "-g2012", "-o", "net.vvp", *sources], cwd=tmp_path, check=True)
    done = subprocess.run(["vvp", "net.vvp"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "net: 0 of 16 examples differ" in done.stdout


@pytest.mark.oracle
def test_a_folder_takes_one_circuit_after_another(tmp_path):
    """Sources of the first stay behind, and are not compiled."""
    for name, stages in (("first", 40), ("second", 1)):
        for_fpga(Dense).emit("rtl", tmp_path, name=name, stages=stages)
        done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert f"{name}: 0 of 16 examples differ" in done.stdout, done.stdout + done.stderr


@pytest.mark.oracle
def test_a_testbench_can_fail(tmp_path):
    for_fpga(Dense).emit("rtl", tmp_path, name="net")
    bench = (tmp_path / "net_test.v").read_text()
    first = bench.index("wanted[2] = ")
    digit = bench.index(";", first) - 1
    (tmp_path / "net_test.v").write_text(bench[:digit] + ("0" if bench[digit] != "0" else "1") + bench[digit + 1 :])
    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "net: 1 of 16 examples differ" in done.stdout


@pytest.mark.oracle
@pytest.mark.parametrize("stages", [0, 2])
def test_verify_simulates_the_examples(stages):
    shape = NETWORKS["rows"][1]
    x = np.asarray(jax.random.normal(jax.random.key(3), (50, *shape)))
    qmodel = qjax.quantize(
        NETWORKS["rows"][0](nnx.Rngs(0)),
        qjax.Recipe("fpga", qjax.QSpec(bits=4), qjax.QSpec(bits=4), method="tqt", weight_method="tqt"),
        x,
    )
    qmodel.eval()
    report: Any = qjax.verify(qjax.convert(qmodel, x), qmodel, [x], runtimes={"verilog": {"stages": stages}})
    assert report.files[0].equal
    assert report.files[0].compared == 250


class Rows(nnx.Module):
    """Every example has two rows of the result."""

    def __init__(self):
        self.dense = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.relu(self.dense(x)).reshape(-1, 3)


@pytest.mark.oracle
def test_several_rows_for_one_example(tmp_path):
    x = jax.random.normal(jax.random.key(0), (4, 2, 6))
    qmodel = qjax.quantize(Rows(), qjax.Recipe(target="tosa"), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    codes = np.asarray(graph.quantize(x))
    (found,) = verilog.prepare(graph, str(tmp_path), 1, "", {})([codes[:1]])
    assert np.array_equal(found, np.asarray(graph.run(codes[:1])))
    with pytest.raises(ValueError, match="has 2 rows for each example"):
        verilog.prepare(graph, str(tmp_path), 4, "", {})([codes])
