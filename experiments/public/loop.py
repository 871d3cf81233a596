"""The training steps of Flax's gemma on eight devices, unchanged: python -m experiments.public.loop --examples FOLDER.

FOLDER is `examples` in a checkout of github.com/google/flax. The mesh has explicit axes, along which the example splits
batch, parameters (FSDP) and features (tensor parallel). Its own steps train a float and a quantized model, once by
`nnx.jit` and once by `jax.jit` with the donated state that `nnx.update` takes back. Then the outputs of the trained
model are compared on one, two and eight devices.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.public.examples import gemma_config, load

STEPS, BATCH, LENGTH, VOCABULARY = 6, 8, 16, 64
AXES = ("data", "fsdp", "tensor")


def mesh_of(shape: tuple[int, int, int]) -> jax.sharding.Mesh:
    """A mesh with explicit axes on the first devices."""
    kinds = (jax.sharding.AxisType.Explicit,) * len(AXES)
    return jax.make_mesh(shape, AXES, kinds, devices=jax.devices()[: int(np.prod(shape))])


def batch(seed: int, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Texts that count upwards, with the places and the segments of their words, split along "fsdp"."""
    first = np.random.default_rng(seed).integers(1, 40, (BATCH, 1))
    text = (first + np.arange(LENGTH + 1)) % (VOCABULARY - 2) + 1
    place = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    made = {
        "inputs": text[:, :-1],
        "targets": text[:, 1:],
        "inputs_position": place,
        "inputs_segmentation": np.ones_like(place),
    }
    rows = jax.sharding.NamedSharding(mesh, jax.P("fsdp"))
    return {name: jax.device_put(np.asarray(x, np.int32), rows) for name, x in made.items()}


class Gemma:
    """The example's own model and steps."""

    def __init__(self, folder: Path) -> None:
        self.train = load(folder / "gemma", "train")
        loaded = self.train.transformer_lib
        self.mask, self.create = loaded.make_causal_attn_mask, loaded.Transformer
        split = self.train.ShardingConfig.fsdp_tp_sharding(tensor_parallel_axis_name="tensor")
        self.config = gemma_config(loaded, VOCABULARY, sliding_window_size=8, shd_config=split)

    def sample(self, batch: dict[str, jax.Array]) -> tuple[Any, ...]:
        """What the example's step passes to the model."""
        return batch["inputs"], batch["inputs_position"], None, self.mask(batch["inputs"] > 0)

    def model(self, mesh: jax.sharding.Mesh, *, quantized: bool) -> Any:
        """A new model."""
        model = self.create(self.config, rngs=nnx.Rngs(params=0, dropout=0))
        if not quantized:
            return model
        qmodel = qjax.quantize(model, qjax.Recipe(), self.sample(batch(0, mesh)))
        qjax.calibrate(qmodel, [self.sample(batch(seed, mesh)) for seed in range(2)])
        return qmodel

    def losses(self, model: Any, mesh: jax.sharding.Mesh, *, transforms: str) -> list[float]:
        """Train as the example does. transforms: "nnx" or "jax", the two forms of the example's loop."""
        optimizer = nnx.Optimizer(model, tx=optax.adamw(1e-2), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        rngs = nnx.Rngs(dropout=0)
        function, jit = {
            "nnx": (self.train.nnx_train_step, nnx.jit),
            "jax": (self.train.jax_train_step, jax.jit),
        }[transforms]
        names = {"static_argnames": ("label_smoothing", "pad_id"), "donate_argnames": ("model", "optimizer")}
        step: Any = jit(function, **names)
        found: list[float] = []
        for seed in range(STEPS):
            out = step(model, optimizer, rngs, batch(seed, mesh), metrics, 0.0, 0)
            if isinstance(out, tuple):
                nnx.update((model, optimizer, rngs, metrics), out[0])
            found.append(round(float(metrics.compute()["loss"]), 4))
            metrics.reset()
        return found


@dataclasses.dataclass
class Outputs:
    """Logits of one batch from the compiled exact forward and from the graph."""

    exact: np.ndarray
    graph: np.ndarray


def outputs(gemma: Gemma, state: Any, mesh: jax.sharding.Mesh) -> Outputs:
    """Those of a trained state on a mesh."""
    with jax.set_mesh(mesh):
        qmodel = gemma.model(mesh, quantized=True)
        put = lambda new, old: jax.device_put(new, old.sharding)  # noqa: E731
        nnx.update(qmodel, jax.tree.map(put, state, nnx.state(qmodel)))
        qmodel.eval()
        sample = gemma.sample(batch(9, mesh))
        forward, graph = qjax.exact(qmodel, sample), qjax.convert(qmodel, sample)
        exact = nnx.jit(lambda qmodel, *args: forward(qmodel, *args)[0])(qmodel, *sample)
        return Outputs(np.asarray(exact), np.asarray(graph(*sample)[0]))


def main(argv: list[str] | None = None) -> int:
    """Print the losses and the differences; returns how many outputs differ."""
    command = argparse.ArgumentParser(prog="python -m experiments.public.loop", description=__doc__)
    command.add_argument("--examples", type=Path, required=True, metavar="FOLDER", help="flax's examples")
    gemma, mesh, state = Gemma(command.parse_args(argv).examples), mesh_of((1, 4, 2)), None
    for transforms in ("nnx", "jax"):
        for quantized in (False, True):
            with jax.set_mesh(mesh):
                model = gemma.model(mesh, quantized=quantized)
                losses = gemma.losses(model, mesh, transforms=transforms)
            print(f"{transforms}.jit, {'quantized' if quantized else 'float'}: losses {losses}", flush=True)
            state = nnx.state(model) if quantized else state
    found = {
        shape: outputs(gemma, jax.device_get(state), mesh_of(shape)) for shape in [(1, 1, 1), (1, 2, 1), (1, 4, 2)]
    }
    first, differ = next(iter(found.values())).exact, 0
    for shape, own in found.items():
        apart = int(np.sum(own.exact != first)), int(np.sum(own.graph != first))
        print(f"{np.prod(shape)} devices: of {first.size} outputs {apart[0]} (exact) and {apart[1]} (graph) differ")
        differ += sum(apart)
    return differ


if __name__ == "__main__":
    sys.exit(int(bool(main())))
