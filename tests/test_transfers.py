"""qjax under `jax.transfer_guard("disallow")`: it reads and writes numbers on the host, and says so to JAX."""

import jax
import numpy as np
from flax import nnx

import qjax

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def model() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(5, 3, rngs=nnx.Rngs(1)))


def test_from_a_model_to_a_file(tmp_path):
    def steps(x):
        qmodel = qjax.quantize(own, qjax.Recipe(), x)
        qjax.calibrate(qmodel, [x])
        qmodel.eval()
        graph = qjax.convert(qmodel, x)
        codes = graph.run(graph.quantize(x))
        forward = qjax.exact(qmodel, x)
        assert qjax.verify(graph, qmodel, [x]).exact
        graph.save(tmp_path / "model.qjax")
        graph.emit("c", tmp_path / "c")
        loaded = qjax.load(tmp_path / "model.qjax")
        return [codes, qmodel(x), graph(x), graph.dequantize(codes), forward(qmodel, x), loaded(x)]

    x, own = jax.device_put(X), model()
    expected = steps(x)
    for given in (x, X):
        with jax.transfer_guard("disallow"):
            found = steps(given)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
