"""Bits per byte of a small language model, quantized: `python -m experiments.language`.

A decoder over bytes is trained on the help texts of Python (`pydoc_data.topics`), of which the last tenth is held out.
Every method starts from the same float weights. Post-training quantization calibrates on eight batches; quantized
training (QAT) goes on for `--tuning` steps, and so does float, for comparison. "equalized" moves scales between a cache
and the weights (`qjax.training.equalize`). QLoRA trains adapters for as many steps
beside a base that is frozen as codes, and merges them. Each model is then converted, and its outputs are compared with
those of `qjax.exact`: with a cache, those of single steps with those of a whole text. `--rows FILE` keeps every row,
and a later run makes what is missing.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from orbax import checkpoint

import qjax
from experiments import language_cache
from qjax.contrib.lab.machine import made_on

LAYERS = "blocks/.*/(query|key|value|out|up|down)"
FOUR = qjax.QSpec(bits=4, axis=-1, group_size=32)
ROWS = qjax.QSpec(bits=8, symmetric=False)

RECIPES = {
    "W8A8": qjax.Recipe(),
    "W4A8": qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), first_last_bits=8),
    "W4A8 in groups": qjax.Recipe(overrides={LAYERS: FOUR}),
    "8da4w": qjax.Recipe(overrides={LAYERS: qjax.Dynamic(weights=FOUR, activations=ROWS, per="row")}),
    "ternary": qjax.Recipe(
        overrides={LAYERS: qjax.Dynamic(weights=qjax.WeightFormat("ternary"), activations=ROWS, per="row")}
    ),
}
"""Setting -> recipe. The last two keep embeddings, norms, attention and the head in 8-bit integers."""

METHODS = ("PTQ", "equalized", "QAT", "QLoRA")
COLUMNS = ("setting", "method", "bits per byte", "behind float", "outputs", "exact: differ", "seconds")


class Block(nnx.Module):
    """Causal attention and a GELU, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.first(x)
        n, t, width = h.shape
        shape = n, t, self.heads, width // self.heads
        query, key, value = (layer(h).reshape(shape) for layer in (self.query, self.key, self.value))
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / np.float32(math.sqrt(shape[-1]))
        weights = jax.nn.softmax(jnp.where(np.tri(t, dtype=bool), scores, np.float32(-1e30)), axis=-1)
        x = x + self.out(jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(n, t, width))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class Decoder(nnx.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, width // 32, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embed(x) + self.places[...]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@dataclasses.dataclass
class Row:
    """One method in one setting. outputs: of the integer graph, of which `differ` are not those of `qjax.exact`."""

    setting: str
    method: str
    bits: float = math.nan
    outputs: int = 0
    differ: int = 0
    seconds: float = 0.0
    error: str = ""


def text() -> np.ndarray:
    """The help texts of this Python, as bytes."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Data:
    """train, test: bytes."""

    train: np.ndarray
    test: np.ndarray
    length: int
    batch: int

    def batches(self, count: int, seed: int) -> Any:
        """Random pieces of the training text, one byte longer than the model reads."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            starts = rng.integers(0, len(self.train) - self.length - 1, self.batch)
            yield np.stack([self.train[i : i + self.length + 1] for i in starts])

    def tests(self, count: int) -> list[np.ndarray]:
        """Consecutive pieces of the held-out text."""
        span = self.length + 1
        pieces = self.test[: len(self.test) // span * span].reshape(-1, span)
        whole = pieces[: len(pieces) // self.batch * self.batch].reshape(-1, self.batch, span)
        return list(whole[:count])


Call = Callable[[Any, Any], jax.Array]
"""(model, tokens) -> scores."""


def plain(model: Any, tokens: Any) -> jax.Array:
    """A model of tokens alone."""
    return model(tokens)


def loss_of(model: Any, pieces: Any, call: Call = plain) -> jax.Array:
    """Mean bits per byte."""
    scores = call(model, pieces[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, pieces[:, 1:]).mean() / np.float32(math.log(2))


def adapted(model: Decoder, rank: int) -> Decoder:
    """The model with an `nnx.LoRA` around each linear layer of its blocks; its arrays are shared."""
    model = nnx.clone(model, variables=False)
    rngs = nnx.Rngs(1)
    for block in model.blocks:
        for name, layer in list(vars(block).items()):
            if isinstance(layer, nnx.Linear):
                lora = nnx.LoRA(layer.in_features, rank, layer.out_features, base_module=layer, rngs=rngs)
                setattr(block, name, lora)
    return model


def fit(
    model: Any,
    optimizer: nnx.Optimizer[Any],
    data: Data,
    steps: int,
    seed: int,
    trained: Any = nnx.Param,
    call: Call = plain,
) -> None:
    """Train in place."""
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state: Any, pieces: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, trained))(model, pieces, call)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    for index, pieces in enumerate(data.batches(steps, seed)):
        state, loss = step(state, pieces)
        if index % 50 == 0:
            print(f"  step {index}: {float(loss):.3f} bits per byte", flush=True)
    nnx.update((model, optimizer), state)


def bits_per_byte(model: Any, data: Data, count: int, call: Call = plain) -> float:
    """On the held-out text."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, pieces: loss_of(nnx.merge(graphdef, state), pieces, call))
    return float(np.mean([run(state, pieces) for pieces in data.tests(count)]))


def float_model(args: argparse.Namespace, data: Data) -> Decoder:
    """The float model, from the folder if it is there."""
    model = Decoder(args.width, args.layers, args.length)
    path = (args.folder / f"float-{args.width}-{args.layers}-{args.length}-{args.batch}-{args.steps}").absolute()
    with checkpoint.StandardCheckpointer() as keeper:
        if path.exists():
            nnx.update(model, keeper.restore(path, nnx.state(model)))
        else:
            adam = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps, 1e-4))
            fit(model, nnx.Optimizer(model, adam, wrt=nnx.Param), data, args.steps, 0)
            keeper.save(path, nnx.state(model))
    return model


def measured(row: Row, model: Decoder, args: argparse.Namespace, data: Data) -> None:
    """Fill a row."""
    model = nnx.clone(model)
    if row.setting == "float":
        if row.method == "trained on":
            adam = optax.adam(optax.cosine_decay_schedule(3e-4, args.tuning))
            fit(model, nnx.Optimizer(model, adam, wrt=nnx.Param), data, args.tuning, 1)
        row.bits = bits_per_byte(model, data, args.tests)
        return
    tokens = [piece[:, :-1] for piece in data.batches(8, 2)]
    cached = row.setting in language_cache.RECIPES
    recipe = (language_cache.RECIPES if cached else RECIPES)[row.setting]
    net: Any = language_cache.Cached(model) if cached else model
    if row.method == "QLoRA":
        net, recipe = adapted(model, args.rank), dataclasses.replace(recipe, adapters="within")

    def arguments(tokens: Any) -> tuple[Any, ...]:
        return language_cache.arguments(net, tokens) if cached else (tokens,)

    def call(model: Any, tokens: Any) -> jax.Array:
        return model(*arguments(tokens))[0] if cached else model(tokens)

    sample = arguments(tokens[0])
    qmodel = qjax.quantize(net, recipe, sample)
    qjax.calibrate(qmodel, [arguments(batch) for batch in tokens])
    if row.method == "equalized":
        qjax.training.equalize(qmodel, [arguments(batch) for batch in tokens], state="cache")
    if row.method == "QLoRA":
        qjax.training.freeze_base(qmodel, sample)
        adam = optax.adam(optax.cosine_decay_schedule(1e-3, args.tuning))
        optimizer = nnx.Optimizer(qmodel, adam, wrt=nnx.LoRAParam)
        fit(qmodel, optimizer, data, args.tuning, 1, nnx.LoRAParam)
        qmodel = qjax.training.merge_adapters(qmodel, sample)
    if row.method == "QAT":
        adam = optax.adam(optax.cosine_decay_schedule(3e-4, args.tuning))
        fit(qmodel, nnx.Optimizer(qmodel, adam, wrt=nnx.Param), data, args.tuning, 1, call=call)
    qmodel.eval()
    row.bits = bits_per_byte(qmodel, data, args.tests, call)
    first = arguments(tokens[0][:, :1]) if cached else sample
    graph = qjax.convert(qmodel, first, state="cache" if cached else None)
    forward = nnx.jit(qjax.exact(qmodel, sample))
    for piece in data.tests(args.compared):
        given = piece[:, :-1]
        mine = np.asarray(language_cache.stepwise(graph, given) if cached else graph(given))
        theirs = np.asarray(call(functools.partial(forward, qmodel), given))
        row.outputs += mine.size
        row.differ += int((mine != theirs).sum())


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    base = next((row.bits for row in rows if row.setting == "float" and row.method == "as trained"), math.nan)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    for row in rows:
        if row.error:
            lines.append(f"| {row.setting} | {row.method} | {row.error} | | | | |")
            continue
        counts = ("", "") if not row.outputs else (f"{row.outputs:,}", f"{row.differ:,}")
        cells = [row.setting, row.method, f"{row.bits:.3f}", f"{row.bits - base:+.3f}", *counts]
        lines.append("| " + " | ".join([*cells, f"{row.seconds:.0f}"]) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.language", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"width": 192, "layers": 4, "length": 128, "batch": 16, "steps": 2000, "tuning": 400, "tests": 24}
    for name, value in {**sizes, "compared": 1, "rank": 8}.items():
        made.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    settings = [*RECIPES, *language_cache.RECIPES]
    made.add_argument("--settings", nargs="+", choices=settings, default=settings, metavar="NAME")
    made.add_argument("--folder", type=Path, default=Path("out/language"), help="where the float model is kept")
    made.add_argument("--rows", type=Path, metavar="FILE", help="keep every row there; make only what is missing")
    made.add_argument("--page", type=Path, metavar="FILE", help="write the table there, as Markdown")
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    whole = text()
    cut = len(whole) * 9 // 10
    data = Data(whole[:cut], whole[cut:], args.length, args.batch)
    model = float_model(args, data)
    count = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    asked = [("float", "as trained")]
    if not set(args.methods) <= {"PTQ", "equalized"}:  # what is trained further is compared with it
        asked.append(("float", "trained on"))
    pairs = [(setting, method) for setting in args.settings for method in args.methods]
    cached = {"QLoRA": False, "equalized": True}
    asked += [(setting, method) for setting, method in pairs if cached.get(method) in (None, setting not in RECIPES)]
    lines = args.rows.read_text().splitlines() if args.rows is not None and args.rows.exists() else []
    known = {(row.setting, row.method): row for row in (Row(**json.loads(line)) for line in lines) if not row.error}
    rows: list[Row] = []
    for setting, method in asked:
        row = known.get((setting, method))
        if row is None:
            row, begin = Row(setting, method), time.perf_counter()
            try:
                measured(row, model, args, data)
            except Exception as error:  # the table says which method fails, and why
                row.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            row.seconds = time.perf_counter() - begin
            if args.rows is not None:
                args.rows.parent.mkdir(parents=True, exist_ok=True)
                with args.rows.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            jax.clear_caches()
        rows.append(row)
        print(table(rows).splitlines()[-1], flush=True)
    options = {name: getattr(args, name) for name in ("width", "layers", "length", "batch", "steps", "tuning", "tests")}
    command = "python -m experiments.language " + " ".join(f"--{name} {value}" for name, value in options.items())
    facts = (
        f"`{command}` made this table: {count:,} parameters, {len(whole):,} bytes of text, "
        f"Python {platform.python_version()}."
    )
    where = made_on()
    done = f"{facts}\n\n{table(rows)}\n\n{where}\n"
    if args.page is not None:
        args.page.write_text(done)
    print(done)
    return rows


if __name__ == "__main__":
    main()
