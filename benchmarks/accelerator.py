"""On a GPU or TPU: bits against the CPU's, and training steps and graphs against the float model's.

`python -m benchmarks accelerator` in an environment whose JAX finds an accelerator, beside the CPU. Networks are
compiled side by side, each in a process of its own, and measured one after the other. `--only` names some of them, or
"bits"; `--wait` is how long they may compile.

ViT-B/16 and the decoder have 4 of their 12 blocks, ResNet-50 one of each stage: blocks are alike, and all of them
take minutes to compile. Two single layers show what a product costs. Weights per channel, activations per tensor and
asymmetric, all scales learned, plain SGD, as in `benchmarks.steps`. In bfloat16 the model computes in it and its
parameters are float32. qwix quantizes matrix products only, because its int8 convolutions have no form on GPUs.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from benchmarks.peers import installed, qwix_qt
from benchmarks.report import Grid
from benchmarks.steps import DYNAMIC, RECIPE, Perceptron, Step, lowered_step
from benchmarks.timing import Failed, Result, paired
from experiments.architectures import arguments, batches, build
from experiments.models.gpt import Decoder
from experiments.models.resnet import Bottleneck, ResNet
from experiments.models.vit import VisionTransformer

ARCHITECTURES = (
    "ResNet-20",
    "ResNet-50",
    "MobileNet V2",
    "Inception V1",
    "EfficientNet",
    "ConvNeXt",
    "U-Net",
    "ViT",
    "BERT",
    "GPT, tied",
    "LSTM",
    "DS-CNN",
    "Autoencoder, conv",
)
"""Of `experiments.architectures`, in little; their bits are compared."""

PRECISIONS = (None, "bfloat16", "BF16_BF16_F32")
"""Values of `jax.default_matmul_precision`; None: a GPU multiplies float32 as TF32."""

CASES: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]] = {
    "ResNet-50, 4 blocks": (lambda rngs: ResNet(Bottleneck, (1, 1, 1, 1), rngs=rngs), (64, 224, 224, 3)),
    "ViT-B/16, 4 blocks": (lambda rngs: VisionTransformer(depth=4, dropout=0.0, rngs=rngs), (64, 224, 224, 3)),
    "decoder of width 768, 4 blocks": (lambda rngs: Decoder(depth=4, rngs=rngs), (8, 1024)),
    "linear layer, 4096 to 4096": (lambda rngs: Perceptron((4096, 4096), rngs=rngs), (8, 512, 4096)),
    "convolution, 3x3 of 128 channels": (lambda rngs: nnx.Conv(128, 128, (3, 3), rngs=rngs), (64, 56, 56, 128)),
}
"""Name -> a model, and the shape of its batch: numbers, or tokens where it has two axes."""

BITS = "bits"
"""What `--only` calls the comparison of bits."""

WAIT = 1800.0
"""Seconds within which all networks are compiled. What is not is a row that says so."""

SPARE = 60.0
"""Seconds that they wait for each other beyond it."""


def accelerated() -> bool:
    """Whether JAX's first device is not the CPU."""
    return jax.devices()[0].platform != "cpu"


# ---------------------------------------------------------------------------- bits


@dataclasses.dataclass(frozen=True)
class Bits:
    """How many outputs of a network differ from the CPU's under a precision, of how many; or why they do not exist."""

    name: str
    precision: str | None
    outputs: int = 0
    training: int = 0
    exact: int = 0
    graph: int = 0
    reason: str = ""

    @property
    def differ(self) -> int:
        """Outputs that must be equal and are not."""
        return self.exact + self.graph + bool(self.reason)

    def row(self) -> tuple[str, ...]:
        """For the table."""
        numbers = (self.outputs, self.training, self.exact, self.graph)
        shown = ("-", "-", "-", f"fails: {self.reason}") if self.reason else tuple(f"{n:,}" for n in numbers)
        return self.name, self.precision or "default", *shown


def bits(name: str, precisions: Sequence[str | None] = PRECISIONS) -> list[Bits]:
    """One network, with what is converted on the CPU, under every precision on the first device."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        model, sample = build(name)
        qmodel = qjax.quantize(model, qjax.Recipe(target="nearest_even"), sample)
        batch = next(iter(batches(sample, 1)))
        qjax.calibrate(qmodel, [batch])
        qmodel.eval()
        graph = qjax.convert(qmodel, sample)
        exact = qjax.exact(qmodel, sample)
        host = nnx.state(qmodel), arguments(batch)
    definition = nnx.graphdef(qmodel)

    def outputs(device: Any, precision: str | None) -> list[np.ndarray]:
        """Of the training forward, the exact forward and the graph."""
        with jax.default_device(device), jax.default_matmul_precision(precision):
            state, args = jax.device_put(host, device)  # keys of random numbers, too
            merged = nnx.merge(definition, state)
            forwards = (
                nnx.jit(lambda model, *args: model(*args))(merged, *args),
                nnx.jit(lambda model, *args: exact(model, *args))(merged, *args),
                graph(*args),
            )
            return [np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)]) for found in forwards]

    expected = outputs(cpu, None)
    rows: list[Bits] = []
    for precision in precisions:
        found = outputs(jax.devices()[0], precision)
        training, *equal = (int(np.sum(a != b)) for a, b in zip(found, expected, strict=True))
        rows.append(Bits(name, precision, expected[0].size, training, equal[0], equal[1]))
    return rows


def bits_or_reason(name: str) -> list[Bits]:
    """The same; what fails is a row of its own."""
    try:
        return bits(name)
    except Exception as error:
        return [Bits(name, None, reason=reason_of(error))]


def reason_of(error: Exception) -> str:
    """Its type and the start of its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"


# ---------------------------------------------------------------------------- time


def in_bfloat16(model: Any) -> Any:
    """The model itself, whose layers compute in bfloat16 now."""
    for _, node in nnx.iter_graph(model):
        module: Any = node
        if isinstance(node, nnx.Module) and hasattr(node, "dtype"):
            module.dtype = jnp.bfloat16
    return model


Compile = Callable[[], Callable[[], Any]]
"""What is traced and lowered already, to what can be called."""


def step(model: Any, x: jax.Array) -> Compile:
    """A training step."""
    lowered, state = lowered_step(model, x, lambda model, x: model(x).astype(jnp.float32))
    return lambda: Step(lowered.compile(), state, x, 0.0)


def forward(model: Any, x: jax.Array) -> Compile:
    """The float model in evaluation mode."""
    model.eval()
    graphdef, state = nnx.split(model)
    lowered = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x)
    return lambda: functools.partial(lowered.compile(), state, x)


def integers(qmodel: Any, x: jax.Array) -> Compile:
    """The integer graph, codes in and codes out."""
    qmodel.eval()
    graph = qjax.convert(qmodel, x[:2])
    call = functools.partial(graph.run, graph.quantize(x))

    def compiled() -> Callable[[], Any]:
        jax.block_until_ready(call())
        return call

    return compiled


def qwix(model: Any, x: jax.Array) -> Any:
    """The model with its matrix products quantized."""
    model.train()
    return qwix_qt(model, x, ("dot_general", "einsum"))


def times(
    name: str,
    half: bool,
    seconds: float,
    barrier: threading.Barrier,
    lock: threading.Lock,
    wait: float = WAIT,
    case: Any = None,
) -> list[Result]:
    """Steps of one network / its float step, and its graph / its float forward.

    barrier: of all networks, when each is compiled. lock: is held while one is measured. wait: seconds to compile.
    case: another one than `CASES[name]`.
    """
    deadline = time.monotonic() + wait
    make, shape = CASES[name] if case is None else case
    title = f"{name}, {'bfloat16' if half else 'float32'}"
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    tokens = len(shape) == 2
    x = jax.random.randint(jax.random.key(1), shape, 0, 1000) if tokens else jax.random.normal(jax.random.key(1), shape)

    def model(change: Callable[[Any, Any], Any] = lambda model, x: model) -> Any:
        """What the change makes of the float model: computed on the CPU, where single operations compile faster."""
        with jax.default_device(cpu):
            made = make(nnx.Rngs(0))
            changed = change(in_bfloat16(made) if half else made, jax.device_put(x[:2], cpu))
            definition, state = nnx.split(changed)
        return nnx.merge(definition, jax.device_put(state, device))

    def calibrated(model: Any, x: Any) -> Any:
        qmodel = qjax.quantize(model, RECIPE, x)
        qjax.calibrate(qmodel, [x])
        return qmodel

    learned = functools.cache(lambda: model(calibrated))

    builds: dict[str, Callable[[], Compile]] = {
        "float": lambda: step(model(), x),
        "qjax": lambda: step(learned(), x),
        "qjax, dynamic": lambda: step(model(lambda model, x: qjax.quantize(model, DYNAMIC, x)), x),
    }
    if "qwix" in installed() and not name.startswith(("ResNet", "convolution")):
        builds["qwix"] = lambda: step(model(qwix), x)
    builds["float forward"] = lambda: forward(model(), x)
    builds["integer graph"] = lambda: integers(learned(), x)
    ready: dict[str, Any] = {}
    pool = concurrent.futures.ThreadPoolExecutor(len(builds))
    try:
        waiting: dict[str, Any] = {}
        for what, started in builds.items():
            begin = time.perf_counter()
            try:
                waiting[what] = pool.submit(started())
            except Exception as error:  # what cannot be built is a row of its own
                ready[what] = error
            print(f"{title}: {what}: traced in {time.perf_counter() - begin:.0f} s", flush=True)
        for what, future in waiting.items():
            try:
                ready[what] = future.exception(max(0.0, deadline - time.monotonic())) or future.result()
            except TimeoutError:
                ready[what] = TimeoutError(f"not compiled within {wait:.0f} s")
            state = "fails" if isinstance(ready[what], Exception) else "compiled"
            print(f"{title}: {what}: {state} {time.monotonic() - deadline + wait:.0f} s after the start", flush=True)
    finally:
        barrier.wait(wait + SPARE)
    found: list[Result] = []
    with lock:
        for what in builds:
            against = "float forward" if what == "integer graph" else "float"
            if what in ("float", "float forward"):
                continue
            row = f"{title}: {what} / {against}"
            broken = [one for one in (ready[what], ready[against]) if isinstance(one, Exception)]
            if broken:
                found.append(Failed(row, f"fails: {reason_of(broken[0])}"))
                continue
            found.append(paired(row, ready[what], ready[against], seconds=seconds, least=5))
            print(*found[-1].row(), flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def accelerator(seconds: float, names: Sequence[str], wait: float = WAIT) -> tuple[list[Bits], list[Result]]:
    """The bits of all of `ARCHITECTURES`, and the times of some of `CASES` in float32 and bfloat16.

    names: some of `CASES`, and `BITS`. wait: seconds within which networks are compiled.

    Raises:
      RuntimeError: JAX finds no accelerator.
    """
    # each process takes the memory that it needs, and no more
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not accelerated():
        raise RuntimeError(f"accelerator: expected a GPU or TPU among JAX's devices. Got {jax.devices()}.")
    context = multiprocessing.get_context("spawn")
    chosen = [(name, half) for name in names if name in CASES for half in (False, True)]
    rows: list[list[Bits]] = []
    results: list[list[Result]] = []
    with context.Manager() as manager, context.Pool(max(1, len(chosen))) as pool:
        barrier, lock = manager.Barrier(max(1, len(chosen))), manager.Lock()
        with lock:  # nothing is measured while bits are compared
            work = [(name, half, seconds, barrier, lock, wait) for name, half in chosen]
            waiting = pool.starmap_async(times, work, chunksize=1)
            if BITS in names:
                with context.Pool(max(1, min(len(ARCHITECTURES), (os.cpu_count() or 1) * 3 // 4))) as others:
                    for found in others.imap_unordered(bits_or_reason, ARCHITECTURES):
                        print(*(row.row() for row in found), sep="\n", flush=True)
                        rows.append(found)
        results = waiting.get()
    rows.sort(key=lambda found: ARCHITECTURES.index(found[0].name))
    return [row for found in rows for row in found], [result for found in results for result in found]


def table(found: Sequence[Bits]) -> Grid:
    """Outputs that differ from the CPU's."""
    columns = ("network", "matmul precision", "outputs", "training forward", "exact forward", "graph")
    return Grid(columns, [row.row() for row in found])
