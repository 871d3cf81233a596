"""Re-estimates the running statistics of batch normalisation for the weights as they are quantized now."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.calibration import track
from qjax.graph.structure import join_arguments, split_arguments
from qjax.model.quantized_model import QuantizedModel, check_quantized, evaluation_copy
from qjax.support.batches import Batches, Inputs


def reestimate_batch_norm(
    qmodel: QuantizedModel,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    progress: bool | None = None,
) -> None:
    """Replace every running mean and variance by its average over these batches.

    During training, a running average mixes statistics of weights whose codes have changed since. With few bits and
    oscillating weights it fits none of them (Nagel et al. 2022, arXiv 2203.11086, section 3). Here all batches see one
    set of weights: each runs through the quantized model with batch norm on the statistics of the batch and everything
    else (such as dropout) in evaluation mode. The new statistics are the means over batches, weighted by their number
    of examples, of the batches' means and of their variances (biased, as flax computes them), summed in float64. Call
    it before `convert`. It changes the model's running statistics and nothing else.

    Args:
      qmodel: the quantized model; its running statistics are changed.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. The first axis
        of the first array is the batch. Use the batch size of the training, because a layer's statistics depend on
        the statistics with which the layer before was normalised.
      inputs: picks the model's arguments out of a batch.
      progress: whether to show progress on stderr; None shows it on a terminal only (`qjax.show_progress`).

    Raises:
      ValueError: no batch, or no `nnx.BatchNorm` in the model.

    Examples:
      ```python
      model = nnx.Sequential(
          nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      )
      qmodel = qjax.quantize(model, recipe, x)
      qjax.training.reestimate_batch_norm(qmodel, batches)
      ```
    """
    check_quantized(qmodel, "reestimate_batch_norm")
    copy = evaluation_copy(qmodel)
    if not _norms(copy):
        raise ValueError(
            "reestimate_batch_norm: expected a model with nnx.BatchNorm layers, got none. A model without them has no "
            "running statistics; leave this call out."
        )
    for module in _norms(copy).values():
        # Without momentum, the running statistics after a call are those of its batch.
        module.use_running_average, module.momentum = False, 0.0
    graphdef, state = nnx.split(copy)

    def one_batch(state: Any, arrays: Any, rest: Any) -> dict[str, dict[str, jax.Array]]:
        model = nnx.merge(graphdef, state)
        model(*join_arguments(arrays, rest))
        return _statistics(model)

    step = jax.jit(one_batch, static_argnums=2)
    totals: dict[str, dict[str, np.ndarray]] = {}
    examples = 0
    given = Batches(batches, inputs, "reestimate_batch_norm")
    for _, args in track(given, "re-estimate batch norm: batch", enabled=progress):
        arrays, rest = split_arguments(args)
        size = next((int(a.shape[0]) for a in jax.tree.leaves(args) if getattr(a, "ndim", 0)), 1)
        for path, found in jax.device_get(step(state, arrays, rest)).items():
            total = totals.setdefault(path, {key: np.zeros(value.shape, np.float64) for key, value in found.items()})
            for key, value in found.items():
                total[key] += size * value.astype(np.float64)
        examples += size
    if examples == 0:
        raise ValueError("reestimate_batch_norm: expected at least one batch with an example, got none.")
    for path, module in _norms(qmodel).items():
        for variable, key in ((module.mean, "mean"), (module.var, "var")):
            variable[...] = jnp.asarray(totals[path][key] / examples, variable[...].dtype)


def _norms(qmodel: QuantizedModel) -> dict[str, nnx.BatchNorm]:
    """The batch norms of a model, by path."""
    found = nnx.iter_modules(qmodel.model)
    return {"/".join(map(str, path)): module for path, module in found if isinstance(module, nnx.BatchNorm)}


def _statistics(qmodel: QuantizedModel) -> dict[str, dict[str, jax.Array]]:
    return {path: {"mean": norm.mean[...], "var": norm.var[...]} for path, norm in _norms(qmodel).items()}
