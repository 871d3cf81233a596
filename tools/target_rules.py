"""docs/target-rules.md: which rule or formula each target takes for each operation, and what each of them computes.

`python tools/target_rules.py` writes the page from the registries, so it cannot fall behind; `--check` only compares.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qjax import targets
from qjax.graph.rounding_phrases import QUANTIZATIONS, phrase, rule_phrase
from qjax.numerics.accumulator import EXACT
from qjax.numerics.rules import get_rule, rule_names
from qjax.ops import formulas
from qjax.targets import Target, Weighted

PAGE = Path(__file__).parent.parent / "docs" / "target-rules.md"
UNARY = ("add", "subtract", "multiply", "matmul", "rescale", "mean", "average_pool")
SETTINGS = {
    "quantize": ("inputs", "qjax.numerics.input_quantization", "how floats become codes"),
    "dequantize": ("outputs", "qjax.numerics.output_dequantization", "how codes become floats"),
    "dynamic": ("rows of floats", "qjax.numerics.dynamic_formulas", "how rows get codes at run time"),
    "tables": ("tables", "qjax.numerics.tables", "how functions of 8-bit codes are tabulated"),
    "softmax": ("softmax", "qjax.numerics.softmax", "how softmax is computed"),
    "lstm": ("LSTM", "qjax.numerics.lstm", "how a step of an LSTM is computed"),
    "squared_difference": ("squared difference", "qjax.ops.squared_difference", "how (x - y)^2 is computed"),
    "svdf": ("SVDF", "qjax.ops.svdf", "how SVDF is computed"),
    "resize": ("bilinear resizing", "qjax.numerics.interpolation", "how images are resized bilinearly"),
}
"""What a target chooses besides, and the module that documents what each choice means."""

INTRODUCTION = """# What each target computes, operation by operation

`python tools/target_rules.py` wrote this page from the code. [Targets](targets.md) explains which runtime each
target stands for, and how that was verified.

After a product with weights, a **rule** turns the accumulator `acc` into a code. It rounds `acc * e` with the
effective scale `e = s_x * s_w / s_y`. An operation without weights follows a **formula** of its own.

```python
from qjax import targets

target = targets.get("tflite_micro")
print(target.weighted("conv", per_channel=True))  # the rule of a convolution with a scale per channel
print(target.formula("add"))  # the formula of an addition
```

In the tables, "exact" is one exact sum in 64 bits and one rounding. A name with `/f32` forms e from a scale rounded
to float32.
"""


def place(function: Any) -> str:
    """Where the documentation of a rule's function is found."""
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}.{function.__qualname__}"


def link(name: str) -> str:
    """A rule's or formula's name that leads to its text."""
    if name in formulas.names():
        return f"[`{name}`](#{formulas.get(name).kernel.__module__})"
    return f"[`{name}`](#{place(get_rule(name.partition('/')[0]).apply)})"


def named(rule: Weighted) -> str:
    return rule.rule if rule.scale == "f64" else f"{rule.rule}/{rule.scale}"


def rows(target: Target) -> Iterator[tuple[str, str, str]]:
    """(operations, method, in words) of one target; operations with one method share a row."""
    found: dict[tuple[str, str], list[str]] = {}

    def add(operation: str, method: str, words: str) -> None:
        found.setdefault((method, words), []).append(operation)

    for op, said in (("dot", "matrix products"), ("conv", "convolutions"), ("depthwise", "depthwise convolutions")):
        for wide in (False, True):
            for per_channel in (False, True):
                rule = target.weighted(op, per_channel=per_channel, wide=wide)  # pyright: ignore[reportArgumentType]
                kind = said + (" of 16-bit activations" if wide else "") + (", per channel" if per_channel else "")
                if wide and rule == target.weighted(op, per_channel=per_channel):  # pyright: ignore[reportArgumentType]
                    continue
                if per_channel and rule == target.weighted(op, wide=wide):  # pyright: ignore[reportArgumentType]
                    continue
                add(kind, link(named(rule)), rule_phrase(rule.rule))
    for op in UNARY:
        name = target.formula(op)
        if name is None:
            add(op, "exact", phrase(f"exact sum ({target.rounding.value})"))
        else:
            add(op, link(name), phrase(name))
            if other := formulas.get(name).broadcast:
                add(f"{op}, operands of different shapes", link(other), phrase(other))
    for field, (said, module, words) in SETTINGS.items():
        value = getattr(target, field)
        if value is not None:
            add(said, f"[`{value}`](#{module})", f"{words}: {QUANTIZATIONS[value]}" if field == "quantize" else words)
    for said, accumulator in (
        ("sums", target.accumulator),
        ("sums of depthwise convolutions", target.depthwise_accumulator),
    ):
        if accumulator not in (None, EXACT):
            add(said, f"[`{accumulator}`](#qjax.numerics.accumulator)", "what is added before the rule")
    for (method, words), operations in found.items():
        yield ", ".join(operations), method, words


def entries(names: Iterator[str] | list[str]) -> list[str]:
    """One entry of the reference for each of these functions or modules."""
    options = (
        "    options: {members: false, show_root_heading: true, show_signature: false, show_root_full_path: false}"
    )
    return [f"::: {name}\n{options}\n" for name in dict.fromkeys(names)]


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for name in targets.names():
        target = targets.get(name)
        lines = [f"| {operations} | {method} | {words} |" for operations, method, words in rows(target)]
        table = ["| operation | method | what it does |", "| --- | --- | --- |", *lines]
        said = target.description.replace("<", "&lt;")
        parts.append("\n".join([f"## `{name}`", "", f"{said[:1].upper()}{said[1:]}.", "", *table, ""]))
    parts.append("## Rules of requantization\n")
    parts += entries([place(get_rule(name).apply) for name in rule_names()])
    parts.append("## Formulas of operations without weights\n")
    parts += entries([formulas.get(name).kernel.__module__ for name in formulas.names()])
    parts.append("## Inputs, outputs, tables, softmax and accumulators\n")
    parts += entries([*(module for _, module, _ in SETTINGS.values()), "qjax.numerics.accumulator"])
    return "\n".join(parts)


def main(write: Callable[[str], Any] = PAGE.write_text) -> int:
    """Write or check the page."""
    text = page()
    if "--check" not in sys.argv:
        write(text)
        print(PAGE, f"{len(targets.names())} targets")
        return 0
    if PAGE.read_text() != text:
        print(f"{PAGE} is not what the registries say: run python tools/target_rules.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
