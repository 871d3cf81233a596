"""The files of a circuit: alkaid's sources and scripts, the layout of the ports, and a testbench with golden runs."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib.rtl import words
from qjax.contrib.rtl.ports import Port
from qjax.export.emit.golden import Case
from qjax.graph.ir import Graph

_SUFFIX = {"verilog": "v", "vhdl": "vhd"}


@dataclasses.dataclass(frozen=True)
class Circuit:
    """logic: alkaid's CombLogic, from all codes of the inputs to all codes of the outputs."""

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    logic: Any


@dataclasses.dataclass(frozen=True)
class Bus:
    """`model_inp` or `model_out` of the wrapper. width: bits of one element. shift: its lowest bit counts 2**shift."""

    elements: int
    width: int
    shift: int
    signed: bool

    @property
    def bits(self) -> int:
        """The bits of all elements, with the first in the lowest bits."""
        return self.elements * self.width

    def packed(self, arrays: Sequence[np.ndarray]) -> int:
        """The codes of one example as one number of the bus."""
        number = 0
        codes = [int(code) for array in arrays for code in array.ravel()]
        for place, code in enumerate(codes):
            number |= ((code >> self.shift) & ((1 << self.width) - 1)) << (place * self.width)
        return number

    def codes(self, number: int) -> list[int]:
        """The codes of one example, from the number of the bus."""
        found = [(number >> (place * self.width)) & ((1 << self.width) - 1) for place in range(self.elements)]
        wrap = 1 << self.width if self.signed else 0
        return [(code - wrap if self.signed and code >> (self.width - 1) else code) << self.shift for code in found]


def files(
    circuit: Circuit, name: str, language: str, stages: int, device: str, period: float, cases: Sequence[Case]
) -> dict[str, bytes]:
    """All files, by path."""
    rtl = words.load("alkaid.codegen").RTLModel
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = rtl(
            circuit.logic,
            folder,
            name,
            flavor=language,
            n_stages=stages or -1,
            print_latency=False,
            part_name=device,
            clock_period=period,
        )
        model.write()
        for here, _, names in os.walk(folder):
            for file in names:
                path = os.path.join(here, file)
                with open(path, "rb") as opened:
                    found[os.path.relpath(path, folder).replace(os.sep, "/")] = opened.read()
    into, out = buses(circuit)
    found[f"{name}_ports.json"] = json.dumps(_ports(circuit, into, out, stages), indent=1).encode()
    if cases:
        bench = _verilog if language == "verilog" else _vhdl
        found[f"{name}_test.{_SUFFIX[language]}"] = bench(name, clocks(stages), into, out, cases).encode()
        sources = [path for path in found if path.startswith("src/") and path.endswith(f".{_SUFFIX[language]}")]
        found["Makefile"] = _makefile(name, language, sources).encode()
    return found


def clocks(stages: int) -> int:
    """The number of clocks after which the result of an example appears."""
    return stages + 1 if stages else 0


def buses(circuit: Circuit) -> tuple[Bus, Bus]:
    """The two buses of the wrapper, whose elements alkaid pads to the widest one."""
    found = list[Bus]()
    for kinds in (circuit.logic.inp_kifs, circuit.logic.out_kifs):
        signed, integer, fraction = (int(np.max(part)) for part in kinds)
        found.append(Bus(np.shape(kinds)[1], signed + integer + fraction, -fraction, bool(signed)))
    return found[0], found[1]


def _ports(circuit: Circuit, into: Bus, out: Bus, stages: int) -> dict[str, Any]:
    described: dict[str, Any] = {"clocks": clocks(stages)}
    for bus_name, bus, ports in (("model_inp", into, circuit.inputs), ("model_out", out, circuit.outputs)):
        first, tensors = 0, list[dict[str, Any]]()
        for port in ports:
            size = int(np.prod(port.shape))
            entry: dict[str, Any] = {"name": port.name, "shape": port.shape, "first_element": first, "elements": size}
            quantization = circuit.graph.tensors[port.name].quantization
            if quantization is not None:
                entry["scale"] = np.asarray(quantization.scale, np.float64).tolist()
                entry["zero_point"] = np.asarray(quantization.zero_point).tolist()
            tensors.append(entry)
            first += size
        described[bus_name] = {
            "element_bits": bus.width,
            "signed": bus.signed,
            "lowest_bit_counts": 1 << bus.shift,
            "tensors": tensors,
        }
    return described


# ---------------------------------------------------------------------------- testbenches


def _makefile(name: str, language: str, sources: Sequence[str]) -> str:
    """The Makefile names its sources: the folder may contain those of an earlier circuit. VHDL is in order of use."""
    tops = [f"src/{name}.{_SUFFIX[language]}", f"src/{name}_wrapper.{_SUFFIX[language]}"]
    rest = [source for source in sources if source not in tops]
    ranks = [lambda x: x.startswith("src/static/"), lambda x: "_tables." in x, lambda x: True]
    ordered = sorted(rest, key=lambda source: ([rank(source) for rank in ranks].index(True), source))
    listed = " ".join([*ordered, *tops, f"{name}_test.{_SUFFIX[language]}"])
    if language == "verilog":
        what = "Icarus Verilog"
        steps = f"iverilog -g2012 -o {name}_test.vvp {listed}", f"vvp {name}_test.vvp"
    else:
        what = "GHDL"
        steps = f"ghdl -a --std=08 {listed}", f"ghdl --elab-run --std=08 {name}_test"
    lines = [
        f"# `make` simulates the golden runs with {what}.",
        "test:",
        *(f"\t{step}" for step in steps),
        ".PHONY: test",
    ]
    return "\n".join(lines) + "\n"


def _verilog(name: str, wait: int, into: Bus, out: Bus, cases: Sequence[Case]) -> str:
    rows = "\n".join(
        f"        given[{i}] = {into.bits}'h{into.packed(x):x};\n        wanted[{i}] = {out.bits}'h{out.packed(y):x};"
        for i, (x, y) in enumerate(cases)
    )
    count, clock = len(cases), ".clk(clk), " if wait else ""
    return f"""`timescale 1 ns / 1 ps

// Golden runs. A new example enters with every clock. Fails with the number of examples that differ.
module {name}_test;
    reg clk = 0;
    reg [{into.bits - 1}:0] x;
    wire [{out.bits - 1}:0] y;
    reg [{into.bits - 1}:0] given [0:{count - 1}];
    reg [{out.bits - 1}:0] wanted [0:{count - 1}];
    integer i, wrong;

    {name}_wrapper circuit ({clock}.model_inp(x), .model_out(y));

    initial begin
{rows}
        wrong = 0;
        for (i = 0; i < {count + wait}; i = i + 1) begin
            x = given[i < {count} ? i : {count - 1}];
            #1;
            if (i >= {wait} && y !== wanted[i - {wait}]) wrong = wrong + 1;
            #1 clk = 1;
            #1 clk = 0;
        end
        $display("{name}: %0d of {count} examples differ", wrong);
        if (wrong != 0) $fatal;
        $finish;
    end
endmodule
"""


def _vhdl(name: str, wait: int, into: Bus, out: Bus, cases: Sequence[Case]) -> str:
    def rows(bus: Bus, numbers: Sequence[int]) -> str:
        return ",\n".join(f'        {i} => "{number:0{bus.bits}b}"' for i, number in enumerate(numbers))

    clock = "clk => clk, " if wait else ""
    last = len(cases) - 1
    return f"""library ieee;
use ieee.std_logic_1164.all;

-- Golden runs. A new example enters with every clock. Fails with the number of examples that differ.
entity {name}_test is
end entity;

architecture test of {name}_test is
    type inputs is array (0 to {last}) of std_logic_vector({into.bits - 1} downto 0);
    type outputs is array (0 to {last}) of std_logic_vector({out.bits - 1} downto 0);
    constant given : inputs := (
{rows(into, [into.packed(x) for x, _ in cases])}
    );
    constant wanted : outputs := (
{rows(out, [out.packed(y) for _, y in cases])}
    );
    signal clk : std_logic := '0';
    signal x : std_logic_vector({into.bits - 1} downto 0);
    signal y : std_logic_vector({out.bits - 1} downto 0);
begin
    circuit : entity work.{name}_wrapper port map ({clock}model_inp => x, model_out => y);

    process
        variable wrong : integer := 0;
    begin
        for i in 0 to {last + wait} loop
            x <= given(i) when i <= {last} else given({last});
            wait for 1 ns;
            if i >= {wait} then
                if y /= wanted(i - {wait}) then
                    wrong := wrong + 1;
                end if;
            end if;
            clk <= '1';
            wait for 1 ns;
            clk <= '0';
            wait for 1 ns;
        end loop;
        report "{name}: " & integer'image(wrong) & " of {len(cases)} examples differ";
        assert wrong = 0 severity failure;
        wait;
    end process;
end architecture;
"""
