"""`qjax.report`: one HTML file about a quantized model, a graph, or two graphs."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from qjax.export import files
from qjax.export.integer_graph import IntegerGraph
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.reporting import curves
from qjax.reporting.document import Document
from qjax.reporting.of_graph import of_graph
from qjax.reporting.of_model import Metric, of_model
from qjax.reporting.of_pair import of_pair
from qjax.reporting.page import page
from qjax.support.batches import Batches, Inputs, brief
from qjax.support.transfers import with_transfers
from qjax.training.log import TrainingLog


@with_transfers
def report(
    thing: Any,
    batches: Iterable[Any] | None = None,
    path: str | os.PathLike[str] = "report.html",
    *,
    inputs: Inputs | None = None,
    metric: Metric | None = None,
    title: str | None = None,
    source: bool = True,
    training: TrainingLog | None = None,
) -> Path:
    """Write a report, one HTML file that needs neither a network nor a server.

    | thing | what the report shows |
    | --- | --- |
    | a quantized model | errors against the float model, the integer graph, whether both agree, what to do next |
    | a graph (`convert`, `load`, `read`) | nodes, scales, accumulators, bytes, MACs; with batches how codes are used |
    | a tuple of two graphs | where they differ first, by how much, and why |

    Every batch is run several times, and stays in memory. A few hundred examples are enough.

    Args:
      thing: see above.
      batches: a list of arrays, or of tuples of the call's arguments; with `inputs`, a list of anything. None is
        allowed for one graph only.
      path: where to write; an existing file is replaced.
      inputs: picks the model's arguments out of a batch.
      metric: (output of the model, batch) -> scalar, the mean over the batch, such as the accuracy. For models only.
      title: the page's title; None generates one.
      source: whether to show the line of your code that each node comes from. The page then contains these lines.
      training: the scalars of the training run, drawn as curves: scales, oscillations, losses.

    Returns:
      The path.

    Raises:
      TypeError: `thing` is neither a quantized model nor one or two graphs.
      ValueError: there are no batches, although they are needed.

    Examples:
      ```python
      def accuracy(scores, batch):
          return (scores.argmax(-1) == batch[1]).mean()


      qjax.report(
          qmodel, [(x, labels)], "report.html", inputs=lambda batch: batch[0], metric=accuracy
      )
      ```
    """
    if training is not None and not isinstance(training, TrainingLog):
        raise TypeError(f"report: training: expected a qjax.training.TrainingLog, got {brief(training)}.")
    document = collect(thing, batches, inputs=inputs, metric=metric, title=title, source=source)
    if training is not None and training.curves:
        document = with_training(document, training)
    files.write(page(document).encode(), path)
    return Path(path)


def collect(
    thing: Any,
    batches: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
    metric: Metric | None = None,
    title: str | None = None,
    source: bool = True,
    function: str = "report",
) -> Document:
    """Collect what `report` shows, as values. function: the name in errors about the batches."""
    graphs = _graphs(thing, function)
    if metric is not None and graphs:
        raise ValueError("report: metric= is for quantized models, because a graph has no float model to compare with.")
    # Only a single graph can be shown without data.
    given = None if batches is None and len(graphs) == 1 else list(Batches(batches, inputs, function))
    calls = None if given is None else [args for _, args in given]
    if len(graphs) == 1:
        return of_graph(graphs[0], calls, title=title or f"Graph for {graphs[0].target}", source=source)
    if graphs:
        assert calls is not None
        made = " and ".join(graph.target for graph in graphs)
        return of_pair(graphs[0], graphs[1], calls, title=title or f"Comparison of {made}", source=source)
    assert given is not None
    name = title or f"{type(thing.model).__name__}, quantized"
    return of_model(thing, given, title=name, metric=metric, source=source)


def with_training(document: Document, log: TrainingLog) -> Document:
    """Add the curves of a training run, and a table of them, to the document."""
    tables = [*document.tables, curves.table_of(log)]
    return dataclasses.replace(document, extra=curves.section(curves.charts_of(log)), tables=tables)


def _graphs(thing: Any, function: str) -> tuple[IntegerGraph, ...]:
    """The graphs to show; empty if `thing` is a quantized model."""
    if isinstance(thing, IntegerGraph):
        return (thing,)
    if isinstance(thing, (tuple, list)):
        pair = cast("tuple[Any, ...]", tuple(cast("Any", thing)))
        if len(pair) == 2 and all(isinstance(graph, IntegerGraph) for graph in pair):
            return pair
        raise TypeError(f"{function}: expected two graphs from qjax.convert in a tuple, got {brief(pair)}.")
    if not isinstance(thing, QuantizedModel):
        check_quantized(thing, function)
    return ()
