"""ExecuTorch: writes a .pte whose 8-bit operators run on the XNNPACK delegate.

The graph becomes a QDQ model, the QDQ model a PyTorch module (`module`), and ExecuTorch's own tools lower that. The
program takes and returns floats.
"""

import contextlib
import importlib
import os
import warnings
from typing import Any

from qjax.assign.retarget import retarget
from qjax.contrib.executorch.module import module_of
from qjax.contrib.profiles.contents import PTE_FORM
from qjax.export import files
from qjax.export.emit.onnx import to_model
from qjax.graph.ir import Graph
from qjax.support.errors import Unsupported

TARGET = "executorch_xnnpack"


def emit(graph: Graph, path: str | os.PathLike[str], *, batch: int = 1) -> None:
    """Write the graph as a .pte.

    Args:
      graph: a graph of the target `executorch_xnnpack`.
      path: of the file.
      batch: how many examples a call takes.

    Raises:
      ModuleNotFoundError: torch or executorch is not installed; the message names what to install.
      ValueError: another target.
      Unsupported: an operator, codes or a bias that the delegate does not support, or a tensor that it computes in
        float.
    """
    files.write(to_bytes(graph, batch=batch), path)


def to_bytes(graph: Graph, *, batch: int = 1) -> bytes:
    """The .pte in memory; see `emit`."""
    if graph.target != TARGET:
        raise ValueError(
            f"emit: a .pte contains scales but no rounding, so ExecuTorch would not compute the codes of the target "
            f"{graph.target!r}. Convert for the target {TARGET!r}, or use graph.retarget({TARGET!r})."
        )
    # ExecuTorch prints, and warns about what it imports.
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        torch = _load("torch")
        lowering = _load("executorch.exir").to_edge_transform_and_lower
        partitioner = _load("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()
        # The form is that of ONNX Runtime's target. It contains scales, but nothing about how a target rounds.
        model = to_model(retarget(graph, "onnxruntime"), batch=batch, **PTE_FORM)
        shapes = [[known.dim_value for known in x.type.tensor_type.shape.dim] for x in model.graph.input]
        exported = torch.export.export(module_of(model), tuple(torch.zeros(shape) for shape in shapes))
        lowered = lowering(exported, partitioner=[partitioner])
        called = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
        left = [name for name in called if "executorch_call_delegate" not in name and "getitem" not in name]
        if left:
            raise Unsupported(f"ExecuTorch: the delegate leaves {', '.join(left)} to other kernels", what="the graph")
        return bytes(lowered.to_executorch().buffer)


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            "emit: a .pte is written by the packages executorch and torch: pip install executorch torch==2.13.0",
            name=module,
        ) from error
