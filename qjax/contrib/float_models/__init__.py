"""Float files of other tools as modules: `qjax.from_onnx` and `qjax.from_tflite`.

    model = qjax.from_onnx("model.onnx")                    # an nnx.Module, whose weights are nnx.Param
    qmodel = qjax.quantize(model, qjax.Recipe(target="tflite_micro"), x)

- `graph`: the common form of both formats, and the table of operators.
- `operators`: their functions in `jax.numpy`, one file for each family.
- `evaluator`: evaluates nodes; keeps the channels of images last, and computes shapes in NumPy.
- `module`: the `nnx.Module`.
- `weights`: which constants of a file are weights.
- `onnx_file`, `tflite_file`: read a file into the common form. Both use the parsers of `qjax.contrib.importers`, which
  reads quantized files. Reading executes nothing that a file contains.
"""

import contextlib
import os
from collections.abc import Generator

from qjax.contrib.float_models.module import FileModule, module_of
from qjax.export import files
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported
from qjax.support.progress import stage

MAX_FILE = 2**33
"""The largest file that is read."""


def from_onnx(path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE) -> FileModule:
    """A float .onnx file as an `nnx.Module`, which `qjax.quantize` takes and training trains.

    Weights are `nnx.Param` under the names of the file, in its shapes: PyTorch's "features.0.weight" is
    `model.features`, then "0", then "weight". Batch norms that the file still has remain norms, whose statistics are
    `nnx.BatchStat`. The call takes the inputs of the file in their order or by name, for any batch, and returns the
    output, or a dict of several by name. Convolutions run with the channels last, whatever the order in the file, so
    that files for devices need no transpositions between them. The module starts in evaluation mode, in which a runtime
    runs the file; `train()` makes norms take the statistics of the batch.

    Args:
      path: a file of the operator sets 7 to 28. Weights may be in other files of the same folder.
      max_bytes: a larger file is refused before it is read.

    Returns:
      A module. `parameter_names` maps names of the file to paths; `input_names` and `output_names` are the file's.

    Raises:
      FileNotFoundError: there is no such file. ReadError: it is damaged.
      Unsupported: it is quantized (`qjax.read` reads it), or has operators that are not supported: one error for all.

    Examples:
      ```python
      from onnx import helper, numpy_helper, save

      weight = numpy_helper.from_array(np.ones((4, 8), np.float32), "fc.weight")
      node = helper.make_node("Gemm", ["x", "fc.weight"], ["y"], transB=1)
      ports = [
          helper.make_tensor_value_info(*port)
          for port in (("x", 1, ["n", 8]), ("y", 1, ["n", 4]))
      ]
      save(
          helper.make_model(helper.make_graph([node], "net", ports[:1], ports[1:], [weight])),
          "float.onnx",
      )

      model = qjax.from_onnx("float.onnx")  # such as a file of torch.onnx.export
      qmodel = qjax.quantize(model, qjax.Recipe(target="onnxruntime"), x)
      ```
    """
    from qjax.contrib.float_models import onnx_file

    name = os.fspath(path)
    with stage("from_onnx"), _named(name):
        return module_of(*onnx_file.read(files.read(name, max_bytes, "an .onnx model", ReadError), name))


def from_tflite(path: str | os.PathLike[str], *, signature: str | None = None, max_bytes: int = MAX_FILE) -> FileModule:
    """A float .tflite file as an `nnx.Module`, which `qjax.quantize` takes and training trains.

    See `from_onnx`. Weights that the file stores as float16, or as integers with scales below float activations, become
    float32.

    Args:
      path: a file of float32 activations.
      signature: the name of one of the file's signatures; None: the first subgraph.
      max_bytes: a larger file is refused before it is read.

    Returns:
      A module, as `from_onnx` does.

    Raises:
      FileNotFoundError: there is no such file. ReadError: it is damaged, or has no such signature.
      Unsupported: it is quantized (`qjax.read` reads it), or has operators that are not supported: one error for all.

    Examples:
      ```python
      # model = qjax.from_tflite("float.tflite"), a file of tf.lite.TFLiteConverter without optimizations
      graph.emit("tflite", "model.tflite")
      try:
          qjax.from_tflite("model.tflite")
      except qjax.Unsupported as error:
          print(error)  # the file holds integers, which qjax.read reads
      ```
    """
    from qjax.contrib.float_models import tflite_file

    name = os.fspath(path)
    with stage("from_tflite"), _named(name):
        return module_of(*tflite_file.read(files.read(name, max_bytes, "a .tflite model", ReadError), signature))


@contextlib.contextmanager
def _named(name: str) -> Generator[None, None, None]:
    """Put the file's name in front of errors."""
    try:
        yield
    except ReadError as error:
        raise ReadError(f"{name}: {error}") from error.__cause__
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from None


__all__ = ["FileModule", "from_onnx", "from_tflite"]
