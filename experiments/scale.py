"""Time and memory of a larger decoder: `python -m experiments.scale --form plain`.

Random weights of a decoder over tokens are written to safetensors files, one for each layer, by another process. They
are read tensor by tensor into a model that had no arrays before. The model is then quantized, calibrated, solved by
GPTQ (`--gptq`), converted, saved, and run. After every stage the largest resident memory of the process so far is
printed. Its layers are modules of a list ("plain") or one `nnx.scan` over stacked parameters ("scan").
"""

import argparse
import dataclasses
import functools
import gc
import multiprocessing
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import qjax
from experiments.language import Block
from qjax.contrib.lab.machine import machine

FORMS = ("plain", "scan")
REST = "rest"
"""The file of what is outside of the layers."""


class Decoder(nnx.Module):
    """Token ids to scores of the next token."""

    def __init__(self, form: str, vocabulary: int, width: int, layers: int, length: int) -> None:
        rngs, heads = nnx.Rngs(0), max(1, width // 64)
        self.form = form
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Param(jax.random.normal(rngs.params(), (length, width)))
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, vocabulary, rngs=rngs)
        if form == "scan":
            self.blocks: Any = nnx.vmap(lambda rngs: Block(width, heads, rngs))(rngs.split(layers))
        else:
            self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = self.embed(tokens) + self.places[...]
        if self.form == "scan":
            call = nnx.remat(lambda block, h: block(h))
            h = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, h)
        else:
            for block in self.blocks:
                h = block(h)
        return self.head(self.norm(h))


@dataclasses.dataclass(frozen=True)
class Stage:
    """seconds: of this stage; busy: of the processor. gib: the largest resident memory of the process until its end."""

    name: str
    seconds: float
    busy: float
    gib: float


@dataclasses.dataclass(frozen=True)
class Result:
    """parameters: of the float model. cosine: between outputs of the graph and of the float model."""

    form: str
    parameters: int
    stages: tuple[Stage, ...]
    nodes: int
    cosine: float


def tensors(layer: int | None, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Random tensors of one layer, or of the rest: small enough that every layer adds to its stream."""
    width, layers, rng = sizes["width"], sizes["layers"], np.random.default_rng(0 if layer is None else layer + 1)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return np.float32(scale) * rng.standard_normal(shape, np.float32)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}/scale": 1 + normal(width, scale=0.1), f"{name}/bias": normal(width, scale=0.1)}

    def linear(name: str, inputs: int, outputs: int, gain: float = 1.0) -> dict[str, np.ndarray]:
        kernel = normal(inputs, outputs, scale=gain * inputs**-0.5)
        return {f"{name}/kernel": kernel, f"{name}/bias": normal(outputs, scale=0.02)}

    if layer is None:
        table = normal(sizes["vocabulary"], width, scale=1.0)
        places = normal(sizes["length"], width, scale=0.1)
        head = linear("head", width, sizes["vocabulary"])
        return {"embed/embedding": table, "places": places, **norm("norm"), **head}
    found = {**norm("first"), **norm("second")}
    for name in ("query", "key", "value"):
        found |= linear(name, width, width)
    found |= linear("out", width, width, layers**-0.5) | linear("up", width, 4 * width)
    return found | linear("down", 4 * width, width, layers**-0.5)


def write(folder: Path, sizes: dict[str, int]) -> None:
    """The files, one after the other."""
    for layer in (None, *range(sizes["layers"])):
        save_file(tensors(layer, sizes), folder / f"{REST if layer is None else layer}.safetensors")


def read(folder: Path, form: str, sizes: dict[str, int]) -> Decoder:
    """The model of the files. Each tensor is read once; the stacks of a scan are filled layer by layer."""
    model: Any = nnx.eval_shape(lambda: Decoder(form, **sizes))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, shape = "/".join(map(str, path)), variable.get_value().shape
        if not name.startswith("blocks/"):
            value = tensor(folder, REST, name)
        elif form == "plain":
            _, layer, own = name.split("/", 2)
            value = tensor(folder, layer, own)
        else:
            value = np.empty(shape, np.float32)
            for layer in range(sizes["layers"]):
                value[layer] = tensor(folder, str(layer), name.removeprefix("blocks/"))
        if value.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {value.shape} in {folder}.")
        variable.set_value(jnp.asarray(value))
    return model


def tensor(folder: Path, file: str, name: str) -> np.ndarray:
    """One tensor of a file, of which nothing else is read."""
    with safe_open(folder / f"{file}.safetensors", "numpy") as found:
        return found.get_tensor(name)


class Clock:
    """Runs stages, and says of each how long it took and how much memory the process has held."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        begin, worked = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(function(*args))
        seconds, busy = time.perf_counter() - begin, time.process_time() - worked
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of Linux; macOS counts bytes
        self.stages.append(Stage(name, seconds, busy, kib / 2**20))
        print(f"  {name}: {seconds:.1f} s, {kib / 2**20:.2f} GiB", flush=True)
        gc.collect()
        return result


def measured(
    form: str,
    sizes: dict[str, int],
    data: list[np.ndarray],
    bits: int,
    folder: Path,
    gptq: dict[str, Any] | None = None,
) -> Result:
    """All stages. data: batches of tokens. bits: of the layers' weights. gptq: its options; None leaves it out."""
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder, sizes))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise RuntimeError(f"the process that writes the files ended with {writer.exitcode}")
    clock = Clock()
    clock.run("import", lambda: None)
    model = clock.run("read", read, folder, form, sizes)
    parameters = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))  # nnx.jit would return the parameters, too
    wanted = np.asarray(clock.run("float forward", forward, state, data[0]))
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1), first_last_bits=8)
    qmodel = clock.run("quantize", qjax.quantize, model, recipe, data[0])
    del model, state
    clock.run("calibrate", qjax.calibrate, qmodel, data)
    if gptq is not None:
        clock.run("gptq", functools.partial(qjax.training.gptq, qmodel, data, **gptq))
    qmodel.eval()
    graph = clock.run("convert", qjax.convert, qmodel, data[0])
    del qmodel
    clock.run("save", graph.save, folder / "graph.qjax")
    found = np.asarray(clock.run("run", graph, data[0]))
    cosine = float(np.sum(found * wanted) / np.sqrt(np.sum(found**2) * np.sum(wanted**2)))
    return Result(form, parameters, tuple(clock.stages), len(graph.ir.nodes), cosine)


def lines(result: Result) -> Iterator[str]:
    """The result as Markdown."""
    yield "| stage | seconds | seconds of the processor | largest memory so far, GiB |"
    yield "| --- | ---: | ---: | ---: |"
    for stage in result.stages:
        yield f"| {stage.name} | {stage.seconds:.1f} | {stage.busy:.1f} | {stage.gib:.2f} |"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--form", choices=FORMS, default="plain")
    made.add_argument("--gptq", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--rounds", type=int, default=2, help="of coordinate descent behind GPTQ; 2")
    made.add_argument("--damping", type=float, help="of GPTQ; chosen for each layer without it")
    sizes = {"vocabulary": 8192, "width": 768, "layers": 12, "length": 64, "batches": 4, "batch": 8, "bits": 4}
    for name, value in sizes.items():
        made.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    made.add_argument("--folder", type=Path, help="for the files; a temporary one without it")
    return made


def main(argv: list[str] | None = None) -> Result:
    args = parser().parse_args(argv)
    sizes = {name: getattr(args, name) for name in ("vocabulary", "width", "layers", "length")}
    rng, shape = np.random.default_rng(0), (args.batch, args.length)
    data = [rng.integers(0, args.vocabulary, shape).astype(np.int32) for _ in range(args.batches)]
    options = {"rounds": args.rounds, "damping": args.damping} if args.gptq else None
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measured(args.form, sizes, data, args.bits, Path(folder), options)
    print(f"{args.form}: {result.parameters:,} parameters, {result.nodes} nodes, cosine {result.cosine:.4f}")
    print("\n".join(lines(result)))
    made = machine()
    print(f"{made['cpu']}, {made['cores']} cores, Python {platform.python_version()}, jax {made['jax']}.")
    return result


if __name__ == "__main__":
    main()
