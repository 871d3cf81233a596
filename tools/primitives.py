"""docs/primitives.md: every primitive that `jax.lax` exports, and what the conversion makes of it.

`python tools/primitives.py` writes the page from the registries, so it cannot fall behind; `--check` only compares.
"""

import sys
from pathlib import Path

import jax
from jax import lax
from jax.extend.core import Primitive

from qjax.numerics.elementary.expression import PRIMITIVES as ELEMENTARY
from qjax.ops import base, float_programs
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.rewrites import complex_as_real, constant_scatter_gather, moves, reduce_prod

PAGE = Path(__file__).parent.parent / "docs" / "primitives.md"
BODIES = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
    "scan",
}
_ORDERS = {"sort": "argsort"}
"""A primitive that a rewriter reads as another one: the operation of that."""
_SPELLED = {"select_n": "select", "add_any": "add", "round": "round_even"}

INTRODUCTION = """# What each primitive of `jax.lax` becomes

`python tools/primitives.py` wrote this page with jax {version}.
qjax reads a model as its jaxpr, so this list is complete. For your own model, use `print(qjax.explain(model, sample))`.

- **integer**: the operations of `qjax.ops` that read it.
  Which one depends on which operands are data, parameters or integers.
  "rewritten" means that slices, concatenations and choices replace it, if positions are constants.
  "products of halves" multiply two halves again and again, for more than three elements and at most 4096.
  "pairs of real numbers" means the real and the imaginary part. Fourier transforms are products with constant matrices.
- **table**: an elementwise function of one tensor. A chain of such steps becomes one correctly rounded table of codes.
- **island**: allowed in a module that the recipe keeps in float (`qjax.FLOAT`).

A primitive without an entry ends the conversion with an error that names your line and two cures.

| primitive | integer | table | island |
| --- | --- | --- | --- |
"""


def names() -> list[str]:
    """The names of the primitives that `jax.lax` exports, and those that the registries know besides."""
    exported = {value.name for key, value in vars(lax).items() if key.endswith("_p") and isinstance(value, Primitive)}
    return sorted(exported)


def page() -> str:
    """The page."""
    readers: dict[str, list[str]] = {}
    for name in base.names():
        for primitive in base.get(name).primitives:
            readers.setdefault(primitive, []).append(name)
    lines: list[str] = []
    counts = [0, 0, 0, 0]
    for name, also in _ORDERS.items():
        readers[name].append(also)
    for name in names():
        integer = ", ".join(readers.get(name, []))
        if name in BODIES:
            integer = "its body is read"
        elif name in moves.WRITTEN or name in constant_scatter_gather.KINDS:
            integer = ", ".join(filter(None, [integer, "rewritten"]))
        elif name in reduce_prod.KINDS:
            integer = ", ".join(filter(None, [integer, "products of halves"]))
        elif name in complex_as_real.COMPLEX:
            integer = "pairs of real numbers"
        elif name in IDENTITIES:
            integer = integer or "passes through"
        table = name in ELEMENTARY or _SPELLED.get(name) in ELEMENTARY or name in IDENTITIES
        island = name in float_programs.STEPS
        counts[0] += 1
        for index, holds in enumerate((bool(integer), table, island), 1):
            counts[index] += holds
        lines.append(f"| `{name}` | {integer} | {'yes' if table else ''} | {'yes' if island else ''} |")
    total = (
        f"\n{counts[0]} primitives: {counts[1]} with integer kernels, {counts[2]} in tables, {counts[3]} in islands.\n"
    )
    return INTRODUCTION.format(version=jax.__version__) + "\n".join(lines) + "\n" + total


def main() -> int:
    """Write or check the page."""
    text = page()
    if "--check" in sys.argv:
        if PAGE.read_text() != text:
            print(f"{PAGE} is not what the registries say: run python tools/primitives.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    print(PAGE, text.strip().splitlines()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
