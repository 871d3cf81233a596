"""What is converted beside an accelerator: on the CPU, with the same bits, and the graph runs on the accelerator."""

import os
import subprocess
import sys

import jax
import numpy as np
from flax import nnx

from qjax.support.on_cpu import cpu_beside, on_cpu


def test_on_the_cpu_nothing_moves():
    model, args = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), (np.ones((1, 2), np.float32),)
    assert cpu_beside() is None
    with on_cpu(model, args) as (near, arrays):
        assert near is model
        assert arrays is args


def test_without_a_cpu_nothing_moves(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    assert cpu_beside() == jax.devices("cpu")[0]

    def none(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    assert cpu_beside() is None


def test_what_is_traced_stays(monkeypatch):
    monkeypatch.setattr("qjax.support.on_cpu.cpu_beside", lambda: jax.devices()[0])
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def forward(x):
        with on_cpu(model, (x,)) as (near, (same,)):
            assert near is model
            assert same is x
        return x

    jax.make_jaxpr(forward)(np.ones((1, 2), np.float32))


TWO_DEVICES = """
import jax, numpy as np
import qjax, qjax.support.on_cpu
from flax import nnx
accelerator, cpu = jax.devices()
model = nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.relu, nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
x = jax.device_put(np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32), accelerator)
qmodel = qjax.quantize(model, qjax.Recipe(target="nearest_even"), x)
nnx.update(qmodel, jax.device_put(nnx.state(qmodel), accelerator))
qmodel.eval()
plain = qjax.convert(qmodel, x)(x)
seen = []
was = qjax.api.workflow.graph_of
def watched(model, args, *rest):
    seen.extend(a for a in jax.tree.leaves((nnx.state(model), args)) if isinstance(a, jax.Array))
    assert (jax.numpy.zeros(()) + 1).devices() == {cpu}
    return was(model, args, *rest)
qjax.api.workflow.graph_of = watched
qjax.support.on_cpu.cpu_beside = lambda: cpu
graph = qjax.convert(qmodel, x)
assert seen and all(a.devices() == {cpu} for a in seen)
assert all(a.devices() == {accelerator} for a in jax.tree.leaves(nnx.state(qmodel)))
y = graph(x)
assert y.devices() == {accelerator}, y.devices()
np.testing.assert_array_equal(y, plain)
codes = graph.quantize(x)
graph.run(codes)
weights = graph.interpreter.constants_near([codes])
assert all(a.devices() == {accelerator} for a in jax.tree.leaves(weights))
assert weights is graph.interpreter.constants_near([x])  # moved by the first call
free = np.asarray(x)
assert graph(free).devices() == {accelerator}  # jax's first device is the default one
with jax.default_device(cpu):
    assert graph(free).devices() == {cpu}
assert graph(jax.device_put(free, cpu)).devices() == {cpu}
np.testing.assert_array_equal(graph(jax.device_put(free, cpu)), plain)
mesh = jax.sharding.Mesh(np.array([accelerator, cpu]), ("examples",))
both = jax.device_put(free, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("examples")))
assert graph(both).devices() == {accelerator, cpu}
np.testing.assert_array_equal(graph(both), plain)
tokens = np.arange(8).reshape(2, 4)
embed = nnx.Sequential(nnx.Embed(8, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
embed = qjax.quantize(embed, qjax.Recipe(target="nearest_even"), jax.device_put(tokens, accelerator))
embed.eval()
words = qjax.convert(embed, tokens)
ids = jax.numpy.asarray(tokens)
inside = jax.jit(lambda ids: words(ids))(ids)  # its first call is traced
spread = words(jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("examples"))))
assert spread.devices() == {accelerator, cpu}
np.testing.assert_array_equal(words(ids), inside)
np.testing.assert_array_equal(words(ids), spread)
assert words(ids).devices() == words.run(words.quantize(ids)).devices() == {accelerator}
exact = qjax.exact(qmodel, x)
np.testing.assert_array_equal(exact(qmodel, x), plain)
print("equal")
"""


def test_beside_an_accelerator():
    """A second device of the CPU stands for the accelerator: both states are committed to theirs."""
    flags = "--xla_force_host_platform_device_count=2"
    found = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "equal", found.stderr
