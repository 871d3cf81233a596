"""Writes measures of nodes for Google's Model Explorer, which overlays them on the graph of an emitted .tflite file.

The format is that of Model Explorer's own `node_data_builder.py`: {"results": {tensor: {"value": number}}, "gradient":
[{"stop": 0, "bgColor": colour}, ...]}. A result belongs to the node that computes the tensor of that name.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qjax.export import files
from qjax.reporting.document import Document
from qjax.reporting.report import collect
from qjax.support.batches import Inputs
from qjax.support.transfers import with_transfers

_COLOURS = {"high": ("#ffffff", "#e06c2b"), "low": ("#e06c2b", "#ffffff"), "": ("#ffffff", "#5b95d6")}
"""The colours of the least and of the greatest value, by the end that deserves attention."""


@with_transfers
def node_data(
    thing: Any,
    batches: Iterable[Any] | None = None,
    folder: str | os.PathLike[str] = "node_data",
    *,
    inputs: Inputs | None = None,
) -> list[Path]:
    """Write the measures of `qjax.report` as node data for Google's Model Explorer, one JSON file per measure.

    Emit the graph as .tflite, open it in Model Explorer (`pip install ai-edge-model-explorer`), and load the files
    under "View per-node data". Nodes are found by the names of their tensors.

    Args:
      thing: a quantized model, or a graph; see `qjax.report`.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. None is
        allowed for a graph.
      folder: where to write `MEASURE.json`, such as `total.json`; it is created if it does not exist.
      inputs: picks the model's arguments out of a batch.

    Returns:
      The paths.

    Raises:
      TypeError: `thing` is neither a quantized model nor a graph.
      ValueError: there are no batches, although they are needed.

    Examples:
      ```python
      graph.emit("tflite", "model.tflite")  # what Model Explorer opens
      files = qjax.node_data(qmodel, batches)  # what it shows on the nodes
      ```
    """
    document = collect(thing, batches, inputs=inputs, source=False, function="node_data")
    place = Path(folder)
    texts = {f"{key}.json": json.dumps(data, indent=1) + "\n" for key, data in measures_of(document).items()}
    files.write_folder(place, {name: text.encode() for name, text in texts.items()}, (".json",))
    return [place / name for name in texts]


def measures_of(document: Document) -> dict[str, dict[str, Any]]:
    """Measure -> its node data; measures without a number are left out."""
    found: dict[str, dict[str, Any]] = {}
    for measure in document.measures:
        values = {node["output"]: node["measures"].get(measure.key) for node in document.nodes}
        results = {tensor: {"value": value} for tensor, value in values.items() if value is not None}
        if results:
            gradient = [{"stop": stop, "bgColor": colour} for stop, colour in enumerate(_COLOURS[measure.bad])]
            found[measure.key] = {"results": results, "gradient": gradient}
    return found
