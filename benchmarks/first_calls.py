"""How long a first call takes, against the float model's first training step: `python -m benchmarks first_calls`.

A first call is traced and compiled before it runs, and that is most of its time. Each call is measured in a process of
its own, in seconds of the processor, all threads together: they survive a busy machine better. Operations are counted
in the StableHLO text that XLA gets, kernels in the program that it makes.
"""

import dataclasses
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import qjax
from benchmarks.report import Grid
from experiments.models import ResNet
from experiments.models.bert import Bert
from experiments.models.recurrent import Recurrent


def tokens(vocabulary: int, batch: int, length: int) -> dict[str, jax.Array]:
    """A batch of an encoder."""
    ids = jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)
    return {"input_ids": ids, "token_type_ids": jnp.zeros_like(ids), "attention_mask": jnp.ones_like(ids)}


def floats(*shape: int) -> jax.Array:
    """A batch of real numbers."""
    return jax.random.normal(jax.random.key(1), shape)


def without_dropout(model: Any) -> Any:
    """The random bits of dropout would be most of what the float step compiles."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            module.rate = 0.0
    return model


def encoder(depth: int) -> Any:
    """A BERT of width 32 with `depth` layers, and a batch."""
    return without_dropout(Bert(64, 16, 32, depth, 4, 64, rngs=nnx.Rngs(0))), tokens(64, 4, 16)


MODELS: dict[str, Callable[[], Any]] = {
    "encoder, 4 layers of 32": lambda: encoder(4),
    "the demo's CNN": lambda: (ResNet(rngs=nnx.Rngs(0)), floats(32, 8, 8, 1)),
    "LSTM, 2 layers of 32": lambda: (Recurrent(nnx.LSTMCell, 16, 32, 2, 12, rngs=nnx.Rngs(0)), floats(8, 20, 16)),
    "encoder, 12 layers of 32": lambda: encoder(12),
    "encoder, 48 layers of 32": lambda: encoder(48),
    "BERT-base": lambda: (without_dropout(Bert(rngs=nnx.Rngs(0))), tokens(30522, 2, 128)),
}
"""Name -> a model and a batch of it."""

ASKED = ("encoder, 12 layers of 32", "encoder, 48 layers of 32")
"""Those that are measured only where they are named."""

CALLS = ("float step", "quantize", "quantized step", "eager", "exact step", "convert", "verify")
"""What is measured; the first is what the others are compared with."""

CACHED = ", cached"
"""Behind a call's name: in a second process with `qjax.cache_compilations`."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """A training step before it runs: seconds to trace it, to lower it, and in XLA's compiler; how large it is."""

    trace: float
    lower: float
    compile: float
    operations: int
    kernels: int


@dataclasses.dataclass(frozen=True)
class First:
    """seconds: of the processor. stages: of a call that is one compiled program."""

    model: str
    call: str
    seconds: float
    stages: Stages | None


def operations(text: str) -> int:
    """The operations of a StableHLO program."""
    return len(re.findall(r"= \"?(?:stablehlo|chlo)\.\w|\bcall @", text))


def kernels(text: str) -> int:
    """The different fusions of a compiled program: XLA compiles equal ones once, and each takes about ten milliseconds.

    text: the program after XLA's own optimizations.
    """
    called = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", text))
    found: set[str] = set()
    for name, body in re.findall(r"^%([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        if name in called:
            names: dict[str, str] = {}
            bare = re.sub(r", (?:metadata=\{[^}]*\}|backend_config=\{.*\}$)", "", body, flags=re.MULTILINE)
            found.add(re.sub(r"%[\w.-]+", lambda m, names=names: names.setdefault(m[0], str(len(names))), bare))
    return len(found)


def step_of(model: Any, x: Any, forward: Callable[[Any, Any], Any] = lambda model, x: model(x)) -> Stages:
    """The first training step of a model: traced, lowered, compiled, run."""
    model.train()
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        def loss(model: Any) -> jax.Array:
            return sum((jnp.mean(jnp.square(y)) for y in jax.tree.leaves(forward(model, x))), jnp.float32(0))

        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, nnx.grad(loss)(model))
        return nnx.state((model, optimizer))

    start = time.process_time()
    traced = step.trace(state, x)
    first = time.process_time()
    lowered = traced.lower()
    second = time.process_time()
    compiled = lowered.compile()
    third = time.process_time()
    jax.block_until_ready(compiled(state, x))
    text = compiled.as_text()
    assert text is not None
    return Stages(first - start, second - first, third - second, operations(lowered.as_text()), kernels(text))


def measure(name: str, call: str, folder: str | None = None) -> First:
    """One first call; what it needs is made before, and not counted. folder: of compiled programs."""
    if folder is not None:
        qjax.cache_compilations(folder)
    model, x = MODELS[name]()
    model.eval()
    done: Any = None

    if call not in ("float step", "quantize"):
        qmodel = qjax.quantize(model, qjax.Recipe(), x)
        qjax.calibrate(qmodel, [x])
        qmodel.eval()
    if call == "verify":
        graph = qjax.convert(qmodel, x)
    start = time.process_time()
    match call:
        case "float step":
            done = step_of(model, x)
        case "quantize":
            qjax.calibrate(qjax.quantize(model, qjax.Recipe(), x), [x])
        case "quantized step":
            done = step_of(qmodel, x)
        case "eager":
            jax.block_until_ready(qmodel(x))
        case "exact step":
            forward = qjax.exact(qmodel, x)
            done = step_of(qmodel, x, forward)
        case "convert":
            qjax.convert(qmodel, x)
        case "verify":
            qjax.verify(graph, qmodel, [x])
        case _:
            raise ValueError(f"expected a call out of {', '.join(CALLS)}, got {call!r}")
    return First(name, call, time.process_time() - start, done)


def first_calls(names: Sequence[str] = (), calls: Sequence[str] = CALLS) -> Iterator[First]:
    """Every call of every model, each in a process of its own; names: some of `MODELS`, none: all but `ASKED`."""
    for name in names or [name for name in MODELS if name not in ASKED]:
        for call in calls:
            yield apart(name, call)
        for call in ("quantized step", "exact step"):
            if call in calls:
                with tempfile.TemporaryDirectory() as folder:
                    apart(name, call, folder)
                    yield dataclasses.replace(apart(name, call, folder), call=call + CACHED)


def apart(*arguments: Any) -> First:
    """`measure` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def table(results: Sequence[First]) -> Grid:
    """Seconds, the ratio to the float model's first step, and where a compiled step's seconds go."""
    floats = {result.model: result for result in results if result.call == CALLS[0]}
    rows: list[tuple[str, ...]] = []
    for result in results:
        against, stages = floats.get(result.model), result.stages
        ratio = "" if against is None else f"{result.seconds / against.seconds:.1f}"
        found = ("",) * 5
        if stages is not None:
            seconds = (f"{x:.1f}" for x in (stages.trace, stages.lower, stages.compile))
            found = (*seconds, f"{stages.operations:,}", f"{stages.kernels:,}")
        rows.append((f"{result.model}: {result.call}", f"{result.seconds:.1f}", ratio, *found))
    return Grid(
        ("first call", "s", "/ float step", "trace, s", "lower, s", "compile, s", "operations", "kernels"), rows
    )
