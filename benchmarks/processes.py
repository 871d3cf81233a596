"""Weak scaling of data-parallel training: as many examples for each process, one process on each core.

Every process has one device and one core of its own. `jax.distributed` joins them, and gradients (and the statistics of
batch norm) are summed among all. A perfect step takes as long with more processes as with one: efficiency 1.
`python -m benchmarks processes`.
"""

import argparse
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.report import Grid

EXAMPLES = {"MLP 784-512-512-512-10": 512, "ResNet-20": 32, "half of ViT-tiny, 65 tokens": 8}
"""Network of `steps.MODELS` -> examples for each process."""
WAYS = ("float", "qjax")
STEPS = 25


@dataclasses.dataclass(frozen=True)
class Scaled:
    """milliseconds: of a step, the median, by the number of processes."""

    network: str
    way: str
    milliseconds: dict[int, float]

    def efficiency(self, processes: int) -> float:
        """The time of one process / the time of that many."""
        return self.milliseconds[1] / self.milliseconds[processes]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"network": self.network, "way": self.way, "milliseconds": self.milliseconds}


def counts() -> tuple[int, ...]:
    """1, 2, 4, ... processes, as far as there are cores."""
    cores = len(os.sched_getaffinity(0))
    return tuple(2**power for power in range(cores.bit_length()) if 2**power <= min(cores, 8))


def processes(names: Sequence[str]) -> Iterator[Scaled]:
    """Every network in float and quantized; names: some of `EXAMPLES`.

    Raises:
      RuntimeError: a process failed.
    """
    for network in names:
        for way in WAYS:
            yield Scaled(network, way, {count: timed(network, way, count) for count in counts()})


def timed(network: str, way: str, count: int) -> float:
    """Milliseconds of a step of that many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.processes", "--network", network, "--way", way, "--count", str(count)]
    command += ["--port", str(port)]
    children = [
        subprocess.Popen(
            [*command, "--process", str(i), "--core", str(cores[i])],
            env=environment,
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
            text=True,
        )
        for i in range(count)
    ]
    try:
        printed, _ = children[0].communicate()
        codes = [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()
    if any(codes):
        raise RuntimeError(f"{network}, {way}: {count} processes ended with {codes}.")
    return float(json.loads(printed.splitlines()[-1]))


def table(results: Sequence[Scaled]) -> Grid:
    """A row for each network and way."""
    sizes = list(results[0].milliseconds) if results else []
    columns = ("network", "step", *(f"{n} process{'es' if n > 1 else ''}, ms" for n in sizes))
    more = [n for n in sizes if n > 1]
    columns += tuple(f"efficiency of {n}" for n in more)
    rows: list[tuple[str, ...]] = []
    for one in results:
        cells = [f"{one.milliseconds[n]:.1f}" for n in sizes] + [f"{one.efficiency(n):.2f}" for n in more]
        rows.append((one.network, one.way, *cells))
    return Grid(columns, rows)


# ---------------------------------------------------------------------------- one of the processes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=main.__doc__)
    parser.add_argument("--network", required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    for name in ("--count", "--process", "--port", "--core"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})  # before JAX counts the cores
    milliseconds = worker(args)
    if args.process == 0:
        print(json.dumps(milliseconds))


def worker(args: argparse.Namespace) -> float:
    """Joins the others, trains, and returns the median of its steps."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import qjax
    from benchmarks.steps import MODELS, RECIPE

    if args.count > 1:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.count, args.process)
    mesh = jax.make_mesh((args.count,), ("data",), axis_types=(AxisType.Auto,))
    make, shape = MODELS[args.network]
    shape = (args.count * EXAMPLES[args.network], *shape[1:])
    images = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model = make(nnx.Rngs(0))
    if args.way == "qjax":
        model = qjax.quantize(model, RECIPE, images[:8])
    model.train()
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)))
    everywhere = NamedSharding(mesh, P())
    # keys of random numbers cannot be placed on other processes' devices; their numbers can
    keys = jax.tree.map(lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key), state)
    raw = jax.tree.map(lambda a, key: jax.random.key_data(a) if key else a, state, keys)
    raw = jax.device_put(jax.tree.map(np.asarray, raw), everywhere)
    wrapped = jax.jit(
        lambda raw: jax.tree.map(lambda a, key: jax.random.wrap_key_data(a) if key else a, raw, keys),
        out_shardings=everywhere,
    )
    state = wrapped(raw)
    x = jax.make_array_from_callback(shape, NamedSharding(mesh, P("data")), functools.partial(_rows, images))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def step(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(jnp.square(m(x))))(model))
        return nnx.state((model, optimizer))

    seconds: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, x))
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds[5:]))


def _rows(array: np.ndarray, index: Any) -> np.ndarray:
    return array[index]


if __name__ == "__main__":
    main()
