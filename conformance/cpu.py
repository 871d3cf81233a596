"""Which CPUs a row of the matrix speaks of: some runtimes choose other kernels, with other codes, on other CPUs."""

import functools
from typing import Literal

Cpu = Literal["any", "no VNNI", "AVX-512 VNNI", "no AVX-512 VNNI"]
"""VNNI multiplies uint8 by int8 exactly; without it, pairs of products saturate to int16."""


@functools.cache
def flags() -> frozenset[str]:
    """What the operating system says of this CPU (Linux); none where it says nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith(("flags", "Features"))]
    except OSError:
        return frozenset()
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def is_this(cpu: Cpu) -> bool:
    """Whether this machine is one of them."""
    vnni = {"avx512_vnni", "avx_vnni"} & flags()
    match cpu:
        case "any":
            return True
        case "no VNNI":
            return not vnni
        case "AVX-512 VNNI":
            return "avx512_vnni" in vnni
        case "no AVX-512 VNNI":
            return "avx512_vnni" not in vnni
