"""Memory of one step of fine-tuning: `python -m experiments.adapters`.

A decoder with random weights is trained in full, with adapters beside a float base, and with adapters beside a frozen
base. The bytes are those of the arrays of the model and of Adam, and what XLA's analysis of the compiled step calls
temporary. Nothing is run. The row of qwix needs its package: `make rivals`, then `PYTHONPATH=.rivals` in front.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.language import FOUR, ROWS, Decoder, adapted, loss_of
from qjax.contrib.lab.machine import machine

BASES = "blocks/.*/base_module"
COLUMNS = ("step", "model", "Adam", "temporary", "together")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes."""

    name: str
    model: int
    optimizer: int
    temporary: int

    @property
    def together(self) -> int:
        return self.model + self.optimizer + self.temporary


def quantized(model: Decoder, recipe: qjax.Recipe, rank: int, sample: Any) -> qjax.QuantizedModel:
    """With adapters beside a frozen base."""
    qmodel = qjax.quantize(adapted(model, rank), recipe, sample)
    qjax.training.freeze_base(qmodel, sample)
    return qmodel


def of_qwix(model: Decoder, rank: int, sample: Any) -> nnx.Module:
    """The same by qwix: NF4 in groups of 64.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    import qwix  # pyright: ignore[reportMissingImports]

    rule = {"module_path": "blocks/.*", "weight_qtype": "nf4", "tile_size": 64, "rank": rank, "alpha": float(rank)}
    return qwix.apply_lora_to_model(model, qwix.LoraProvider(**rule), sample, rngs=nnx.Rngs(1))


def memory(name: str, model: nnx.Module, trained: Any, pieces: Any) -> Memory:
    """Of one step of Adam for the variables that `trained` names."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=trained)
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any, pieces: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        grads = nnx.grad(loss_of, argnums=nnx.DiffState(0, trained))(model, pieces)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    analysis = jax.jit(step, donate_argnums=0).lower(state, pieces).compile().memory_analysis()
    assert analysis is not None
    size = lambda tree: sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(tree)))  # noqa: E731
    return Memory(name, size(model), size(optimizer), int(analysis.temp_size_in_bytes))


def rows(args: argparse.Namespace) -> list[Memory | str]:
    """The table's rows; a text says why a row is missing."""
    pieces = jnp.zeros((args.batch, args.length + 1), jnp.int32)
    sample = pieces[:, :-1]
    lora = nnx.LoRAParam
    nf4, four = qjax.WeightFormat("nf4"), qjax.Dynamic(weights=FOUR, activations=ROWS, per="row")
    narrow = qjax.Recipe(adapters="within", overrides={BASES: qjax.QSpec(bits=4, axis=-1)})

    def made() -> Decoder:
        return Decoder(args.width, args.layers, args.length)

    cases: dict[str, Callable[[], tuple[nnx.Module, Any]]] = {
        "float, all weights": lambda: (made(), nnx.Param),
        "float base, LoRA": lambda: (adapted(made(), args.rank), lora),
        "qwix, NF4 base, LoRA": lambda: (of_qwix(made(), args.rank, sample), lora),
        "qjax, NF4 base, LoRA": lambda: (
            quantized(made(), qjax.Recipe(overrides={".*": qjax.FLOAT, BASES: nf4}), args.rank, sample),
            lora,
        ),
        "qjax, 8da4w base, LoRA": lambda: (
            quantized(made(), qjax.Recipe(overrides={".*": qjax.FLOAT, BASES: four}), args.rank, sample),
            lora,
        ),
        "qjax, W4A8 with LoRA within": lambda: (quantized(made(), narrow, args.rank, sample), lora),
    }
    found: list[Memory | str] = []
    for name, case in cases.items():
        try:
            model, trained = case()
            found.append(memory(name, model, trained, pieces))
        except ModuleNotFoundError as error:
            found.append(f"{name}: {error}")
        print(table(found).splitlines()[-1], flush=True)
        jax.clear_caches()
    return found


def table(found: list[Memory | str]) -> str:
    """Markdown, in MB."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for row in found:
        if isinstance(row, str):
            lines.append(f"| {row} | | | | |")
            continue
        numbers = (row.model, row.optimizer, row.temporary, row.together)
        lines.append(f"| {row.name} | " + " | ".join(f"{number / 1e6:.1f}" for number in numbers) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"width": 512, "layers": 4, "length": 128, "batch": 2, "rank": 8}.items():
        made.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the table there, as Markdown")
    return made


def main(argv: list[str] | None = None) -> list[Memory | str]:
    args = parser().parse_args(argv)
    found = rows(args)
    weights = Decoder(args.width, args.layers, args.length)
    count = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(nnx.state(weights, nnx.Param)))
    made = machine()
    where = f"Made on {made['cpu']}, jax {made['jax']}, flax {made['flax']}."
    text = f"{count:,} parameters, MB.\n\n{table(found)}\n\n{where}\n"
    if args.page is not None:
        args.page.write_text(text)
    print(text)
    return found


if __name__ == "__main__":
    main()
