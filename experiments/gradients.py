"""What rounding gradients to integers costs in accuracy: `python -m experiments.gradients`.

Networks are trained from scratch on the handwritten digits with 8-bit weights and activations, and with gradients in
floats or in 4, 6 and 8 bits, rounded to nearest or stochastically. `--rows FILE` keeps every run, and a later call
makes only those that are missing. `--study` instead measures the error of one gradient against three predictions:

1. The variance of a stochastically rounded gradient is s^2 sum x^2 f (1 - f), f being the fractions of g / s.
2. Its mean over n keys approaches the float gradient as 1 / sqrt(n), through any depth; nearest has a bias that stays.
3. Where a gradient is below half a step of the largest one, nearest stalls, and stochastic rounding goes on.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.data import Digits, digits
from experiments.models import MLP, ResNet
from experiments.training import Schedule, accuracy, one_hot, scores
from qjax.numerics.gradient_codes import encode, key_words
from qjax.support.tables import Grid


class Rows(nnx.Module):
    """A GRU that reads an image row by row, and a dense layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(8, 32, rngs=rngs))
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: Any = self.rnn(x[..., 0])
        return self.head(hidden[:, -1])


class Patches(nnx.Module):
    """A transformer's block over the rows of an image."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed, self.head = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(32, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x[..., 0]) + self.places[...][None]
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.head(jnp.mean(x, axis=1))


MODELS: dict[str, Any] = {"MLP": MLP, "ResNet": ResNet, "GRU": Rows, "transformer": Patches}
FLOAT = "float"
WAYS: dict[str, qjax.Gradients | None] = {FLOAT: None} | {
    f"{bits} bits, {rounding}": qjax.Gradients(bits=bits, rounding=rounding)
    for bits, rounding in itertools.product((8, 6, 4), ("stochastic", "nearest"))
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training: the accuracy on the test images, the mean loss of the last epoch, and the seconds it took."""

    model: str
    way: str
    seed: int
    epochs: int
    accuracy: float
    loss: float
    seconds: float

    @property
    def run(self) -> tuple[str, str, int, int]:
        return self.model, self.way, self.seed, self.epochs


def trained(name: str, way: str, seed: int, epochs: int, data: Digits) -> Row:
    """Train one network from scratch; every step has a key of its own."""
    start, schedule = time.perf_counter(), Schedule(epochs)
    recipe = qjax.Recipe(gradients=WAYS[way])
    qmodel = qjax.quantize(MODELS[name](rngs=nnx.Rngs(seed)), recipe, data.train_images[:64])
    qjax.calibrate(qmodel, [data.train_images[:256]])
    qmodel.train()
    graphdef, state = nnx.split((qmodel, schedule.optimizer(qmodel, len(data.train_images))))

    @jax.jit
    def step(state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)

        def loss_of(model: Any) -> jax.Array:
            with qjax.training.gradient_key(key):
                return jnp.mean(optax.softmax_cross_entropy(model(x), y))

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    rng, targets, size = np.random.default_rng(seed), one_hot(data.train_labels), schedule.batch_size
    count, key, losses = len(targets) // size, jax.random.key(seed), list[Any]()
    for epoch in range(epochs):
        losses = []
        for index, rows in enumerate(rng.permutation(len(targets))[: count * size].reshape(count, -1)):
            own = jax.random.fold_in(key, epoch * count + index)
            state, loss = step(state, own, data.train_images[rows], targets[rows])
            losses.append(loss)
    trained_model, _ = nnx.merge(graphdef, state)
    trained_model.eval()
    found = accuracy(scores(trained_model, data.test_images), data.test_labels)
    return Row(name, way, seed, epochs, found, float(np.mean(losses)), time.perf_counter() - start)


def read(path: Path | None) -> list[Row]:
    """The rows of a file, one JSON document per line; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def table(rows: Sequence[Row]) -> Grid:
    """Mean accuracy and loss over seeds, and the least accuracy."""
    found: list[list[str]] = []
    for name, way in itertools.product(MODELS, WAYS):
        own = [row for row in rows if (row.model, row.way) == (name, way)]
        if own:
            mean, loss = (float(np.mean([getattr(row, field) for row in own])) for field in ("accuracy", "loss"))
            least = min(row.accuracy for row in own)
            found.append([name, way, f"{mean:.4f}", f"{least:.4f}", f"{loss:.4f}", str(len(own))])
    return Grid(["model", "gradients", "accuracy", "least", "loss", "seeds"], found)


# ------------------------------------------------------------------ the study


def variance(bits: int, keys: int) -> tuple[float, float]:
    """The predicted and the measured variance of the gradient of a weight, summed over its elements."""
    rng, how = np.random.default_rng(0), qjax.Gradients(bits=bits)
    x, g = (rng.normal(size=(64, n)).astype(np.float32) for n in (16, 24))
    scale = np.abs(g).max() / how.top
    fraction = g / scale - np.floor(g / scale)
    predicted = float(scale**2 * np.sum((x**2).T @ (fraction * (1 - fraction))))

    def gradient(key: jax.Array) -> jax.Array:
        coded = encode(jnp.asarray(g), (0, 1), how, key_words(key))
        return jnp.asarray(x).T @ (coded.digits[0].astype(jnp.float32) * coded.scale)

    drawn = np.asarray(jax.vmap(gradient)(jax.random.split(jax.random.key(0), keys)))
    return predicted, float(np.sum(np.var(drawn.astype(np.float64), axis=0)))


class Deep(nnx.Module):
    """Dense layers of one width."""

    def __init__(self, depth: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def bias(depth: int, rounding: Any, keys: int, bits: int = 8) -> tuple[float, float]:
    """The error of the first layer's gradient, relative to the float one: of one key, and of the mean over all keys."""
    x = jax.random.normal(jax.random.key(1), (64, 16))
    found: list[Any] = []
    for how in (None, qjax.Gradients(bits=bits, rounding=rounding)):
        qmodel = qjax.quantize(Deep(depth, rngs=nnx.Rngs(0)), qjax.Recipe(gradients=how), x)
        graphdef, state = nnx.split(qmodel)

        def gradient(state: Any, key: jax.Array, graphdef: Any = graphdef) -> jax.Array:
            def loss_of(model: Any) -> jax.Array:
                with qjax.training.gradient_key(key):
                    return jnp.mean(jnp.square(model(x) - 1))

            return nnx.grad(loss_of)(nnx.merge(graphdef, state))["model"]["layers"][0]["kernel"][...]

        compiled = jax.jit(gradient)
        count = keys if how is not None and how.stochastic else 1
        found.append(np.stack([np.asarray(compiled(state, jax.random.key(i)), np.float64) for i in range(count)]))
    exact, drawn = found[0][0], found[1]
    size = np.linalg.norm(exact)
    return float(np.linalg.norm(drawn[0] - exact) / size), float(np.linalg.norm(drawn.mean(0) - exact) / size)


def stalled(rounding: Any, steps: int = 400) -> float:
    """How far a weight whose gradient is a thousandth of another one's comes on its way from 1 to 0."""
    how, key = qjax.Gradients(rounding=rounding), jax.random.key(0)

    def step(w: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        words = key_words(jax.random.fold_in(key, index)) if how.stochastic else None
        coded = encode(jnp.stack([jnp.float32(100), jnp.float32(0.1) * w]), (0,), how, words)
        return w - jnp.float32(0.1) * coded.digits[0][1].astype(jnp.float32) * coded.scale[0], None

    end, _ = jax.lax.scan(step, jnp.float32(1), jnp.arange(steps))
    return float(1 - end)


def study(keys: int) -> Grid:
    """Each prediction beside what was measured."""
    found: list[list[str]] = []
    for bits in (4, 6, 8):
        predicted, measured = variance(bits, keys * 16)
        found.append([f"variance of dw, {bits} bits", f"{predicted:.4g}", f"{measured:.4g}"])
    for depth in (1, 4):
        one, mean = bias(depth, "stochastic", keys)
        expected = f"{one / np.sqrt(keys):.2%}"
        found.append([f"mean over {keys} keys, {depth} layers (one key: {one:.2%})", expected, f"{mean:.2%}"])
        found.append([f"nearest, {depth} layers", "stays", f"{bias(depth, 'nearest', keys)[1]:.2%}"])
    found.append(["way of a weight with small gradients, nearest", "0", f"{stalled('nearest'):.3f}"])
    found.append(["the same, stochastic", f"{1 - 0.99**400:.3f}", f"{stalled('stochastic'):.3f}"])
    return Grid(["measurement", "predicted", "measured"], found)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gradients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep every run there; make only what is missing")
    parser.add_argument("--study", action="store_true", help="measure the error of gradients; train nothing")
    parser.add_argument("--keys", type=int, default=64, help="of the study")
    args = parser.parse_args(argv)
    if args.study:
        print(study(args.keys))
        return []
    data, rows = digits(), read(args.rows)
    known = {row.run for row in rows}
    for name, way, seed in itertools.product(args.models, args.ways, range(args.seeds)):
        if (name, way, seed, args.epochs) in known:
            continue
        row = trained(name, way, seed, args.epochs, data)
        rows.append(row)
        if args.rows is not None:
            with args.rows.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(f"{name}, {way}, seed {seed}: {row.accuracy:.4f}, {row.seconds:.0f} s", flush=True)
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
