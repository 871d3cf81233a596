"""Places the arrays of a quantized model on a mesh of devices.

The placement does not change the result of a program under `jit`, because XLA adds the communication. The optimizer's
moments are placed like their parameters. The numbers of quantizers are one small vector of each kind, which every
device holds entirely, so all devices round alike. Batch norm and counters are replicated as well.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qjax.model.quantized_model import QuantizedModel


def shardings(state: Any, qmodel: QuantizedModel, mesh: Mesh, rules: Mapping[str, PartitionSpec] | None = None) -> Any:
    """A tree like `state` of `NamedSharding`, for `jax.device_put` and for restoring a checkpoint.

        state = nnx.state((qmodel, optimizer))
        placed = jax.device_put(state, qjax.training.shardings(state, qmodel, mesh, {".*/up/kernel": P(None, "model")}))
        nnx.update((qmodel, optimizer), placed)

    Args:
      state: the state of the quantized model, or of a tuple with its optimizer.
      qmodel: provides the parameters, for messages.
      mesh: the devices. Splitting batches along one of its axes is up to the code that feeds them.
      rules: path of a parameter in the user's model (a regular expression that must match in full) -> its spec. The
        last matching rule wins; without one, or with None, the parameter is replicated (data parallelism).

    Raises:
      ValueError: a rule matches no parameter, names an axis that the mesh lacks, or splits an axis into unequal parts.
    """
    rules = dict(rules or {})
    used: set[str] = set()

    def spec_of(path: str) -> PartitionSpec:
        found = PartitionSpec()
        for pattern, spec in rules.items():
            if re.fullmatch(pattern, path):
                used.add(pattern)
                found = spec
        return found

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        name = "/".join(keys).removesuffix("/value")
        # The optimizer has one copy of the model's tree for each of its moments.
        start = next((index for index, key in enumerate(keys) if key in ("model", "quantizers")), None)
        spec = PartitionSpec()
        if start is not None and keys[start] == "model":
            spec = spec_of("/".join(keys[start + 1 :]).removesuffix("/value"))
        return NamedSharding(mesh, _check_spec(name, spec, leaf.shape, mesh))

    found = jax.tree_util.tree_map_with_path(place, state)
    unused = [pattern for pattern in rules if pattern not in used]
    if unused:
        parameters = sorted("/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(qmodel.model)))
        raise ValueError(
            f"shardings: the rules {', '.join(map(repr, unused))} match no parameter. A path must match in full; there "
            f"are {', '.join(parameters)}."
        )
    return found


def _check_spec(name: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    if len(spec) > len(shape):
        raise ValueError(f"shardings: {name!r} has shape {shape}, and {spec} names more axes than that.")
    for size, axes in zip(shape, spec, strict=False):
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [axis for axis in names if axis not in mesh.shape]
        if unknown:
            raise ValueError(f"shardings: {name!r}: the mesh has the axes {', '.join(mesh.shape)}, got {spec}.")
        parts = 1
        for axis in names:
            parts *= mesh.shape[axis]
        if size % parts:
            raise ValueError(
                f"shardings: {name!r} of shape {shape} cannot be split by {spec}: {size} is no multiple of {parts} "
                "devices. Choose another axis or a smaller mesh."
            )
    return spec
