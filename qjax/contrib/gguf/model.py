"""Connects the parameters of a model with the tensors of a GGUF file."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qjax.contrib.gguf.blocks import Parts, pack
from qjax.contrib.gguf.file import GGUFFile, Tensor, read
from qjax.export import files
from qjax.layers.frozen import FrozenParam, frozen_parameters
from qjax.model.quantized_model import QuantizedModel, check_quantized
from qjax.numerics.block_formats import BLOCK, BLOCK_FORMATS
from qjax.numerics.weight_formats import WeightFormat, encode_stored
from qjax.ops.formatted import Layout
from qjax.ops.frozen import Frozen
from qjax.recipe.recipe import FLOAT, Dynamic
from qjax.support.errors import refuse
from qjax.support.names import did_you_mean
from qjax.training.frozen import freeze_weights, replace_variables


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the numbers of a parameter are.

    Args:
      tensors: a name, or the names of layers that the parameter stacks along its first axis.
      transposed: whether the parameter has the inputs first. None: if the parameter is called "kernel", as in Flax.

    Examples:
      ```python
      names = {
          "up": qjax.gguf.Source(
              ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"), transposed=True
          )
      }
      ```
    """

    tensors: str | tuple[str, ...]
    transposed: bool | None = None


Names = Callable[[str], str | Source | None] | Mapping[str, str | Source | None]
"""Path of a parameter, such as "blocks/0/query/kernel" -> its tensor; None for one that the file does not have."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of `load`, `freeze` and `write`.

    Args:
      parameters: path of a parameter -> the names of its tensors.
      left: (path, why) of parameters whose codes are not in memory.
      bytes: of all arrays of the model; of the file that `write` wrote.
    """

    parameters: Mapping[str, tuple[str, ...]]
    left: tuple[tuple[str, str], ...]
    bytes: int

    def __str__(self) -> str:
        lines = [f"{len(self.parameters)} parameters from the file, {self.bytes:,} bytes"]
        return "\n".join([*lines, *(f"left in float: {path}, because {why}" for path, why in self.left)])


def load(
    model: nnx.Module, file: GGUFFile | Mapping[str, Any], names: Names, *, unused: Collection[str] = ()
) -> Loaded:
    """Set the parameters of a float model to the numbers of a file, in place.

    Args:
      model: any Flax model.
      file: a GGUF file, or arrays by name, such as those of `safetensors.numpy.load_file`.
      names: which tensor each parameter is, see `Source`.
      unused: tensors of the file that the model does not need.

    Raises:
      ValueError: a parameter without a tensor, a tensor that no parameter takes, or shapes that differ; one error for
        all. The model is then unchanged.

    Examples:
      ```python
      def names(path):  # "blocks/0/query/kernel" -> "blk.0.attn_q.weight"
          layer, part = path.split("/")[1:3]
          return f"blk.{layer}.{ {'query': 'attn_q'}[part] }.weight"


      qjax.gguf.load(model, qjax.gguf.read("model.gguf"), names)
      ```
    """
    tensors = _tensors(file)
    wrong: list[str] = []
    values: dict[tuple[Any, ...], np.ndarray] = {}
    found: dict[str, tuple[str, ...]] = {}
    for path, variable in _parameters(model):
        key = "/".join(map(str, path))
        source = _source(names, key, tensors, wrong)
        if source is None:
            continue
        shape = tuple(variable.shape)
        value = _value(source, key, tensors, shape)
        if value is None:
            sizes = ", ".join(f"{name} {'x'.join(map(str, _shape(tensors[name])))}" for name in _names(source))
            wrong.append(f"{key}: expected {'x'.join(map(str, shape))}, got {sizes}. See qjax.gguf.Source.")
            continue
        if not np.array_equal(value, value.astype(variable.dtype).astype(np.float32), equal_nan=True):
            wrong.append(
                f"{key}: its dtype {variable.dtype} does not hold the numbers of {_names(source)[0]}. Make the "
                "parameter float32 (param_dtype=jnp.float32)."
            )
            continue
        found[key], values[path] = _names(source), value
    taken = {name for group in found.values() for name in group}
    left = sorted(set(tensors) - taken - set(unused)) if not wrong else []
    if left:
        wrong.append(
            f"{len(left)} tensors of the file belong to no parameter: {', '.join(left[:5])}. Name them in `names` or "
            "in unused=."
        )
    if extra := sorted(set(unused) - set(tensors)):
        wrong.append(f"unused: the file has no tensor {extra[0]!r}.{did_you_mean(extra[0], tensors)}")
    refuse(wrong)
    for path, variable in _parameters(model):
        if path in values:
            variable[...] = jnp.asarray(values.pop(path), variable.dtype)
    return Loaded(found, (), _bytes(model))


def overrides(
    file: GGUFFile,
    names: Names,
    model: nnx.Module,
    *,
    activations: Literal["block", "row", "float", "llama_cpp"] = "block",
) -> dict[str, Any]:
    """The overrides of a recipe under which products have the weights of the file, in its formats.

    Everything outside of these products is float, as in llama.cpp. Where the file ties the head to the embedding, the
    products that belong to no other module have the format of the embedding.

    Args:
      file: a GGUF file.
      names: see `load`.
      model: the float model, whose parameters are named.
      activations: how products get those. "block": int8 codes with a scale for each 32, as llama.cpp quantizes them
        for all but K formats, where it has one for each 256; "row": with one for each row; "float": no codes;
        "llama_cpp": as "block", but with llama.cpp's own codes and sums on x86-64 with AVX2, in every bit, see the
        argument `arithmetic` of `qjax.Dynamic`.

    Raises:
      ValueError: a format that `qjax.WeightFormat` does not have.

    Examples:
      ```python
      recipe = qjax.Recipe(
          overrides={".*": qjax.FLOAT, **qjax.gguf.overrides(file, names, model)}
      )
      ```
    """
    _checked(file)
    wrong: list[str] = []
    found: dict[str, Any] = {}
    for path, _ in _parameters(model):
        key = "/".join(map(str, path))
        source = _source(names, key, file.tensors, wrong)
        if source is None:
            continue
        formats = {file[name].format for name in _names(source)}
        is_embedding = _names(source) == ("token_embd.weight",)
        if formats <= {"f32", "f16", "bf16"} or (is_embedding and "output.weight" in file.tensors):
            continue
        if len(formats) > 1 or not formats <= set(BLOCK_FORMATS):
            wrong.append(
                f"{key}: expected one of the formats {', '.join(BLOCK_FORMATS)}, got {', '.join(sorted(formats))}. "
                "`load` reads its floats; choose an override of your own, or convert the file with llama-quantize."
            )
            continue
        format = WeightFormat(formats.pop())
        setting = format if activations == "float" else _dynamic_setting(format, activations)
        # the root's own products have no path of their own
        module = ".*" if is_embedding or len(path) == 1 else "/".join(map(str, path[:-1]))
        if found.setdefault(module, setting) != setting:
            wrong.append(
                f"{key}: expected {found[module]}, which another weight of its module has, got {setting}. An override "
                "is for all products of a module: put them into modules of their own."
            )
    refuse(wrong)
    # the root's own products alone get the format of the head
    parts = {str(path[0]): FLOAT for path, node in nnx.iter_graph(model) if path and isinstance(node, nnx.Module)}
    return {".*": found.pop(".*", FLOAT), **parts, **found}


def freeze(qmodel: QuantizedModel, sample: Any, file: GGUFFile, names: Names, *, train: Any = nnx.LoRAParam) -> Loaded:
    """Store the weights of a quantized model as the file's own codes, in place; those that `train` selects stay floats.

    The model must hold the numbers of the file, see `load`. `qjax.training.freeze_base` computes codes from the floats,
    which may differ from the file's where its author searched for better scales; here they are the file's.

    Args:
      qmodel: a model that was quantized with `overrides`.
      sample: one batch; only its shapes matter.
      file, names: see `load`.
      train: an nnx filter of the parameters that train.

    Raises:
      ValueError: a weight with another format than in the file, or with other numbers. The model is then unchanged.

    Examples:
      ```python
      print(qjax.gguf.freeze(qmodel, tokens, file, names))
      ```
    """
    check_quantized(qmodel, "freeze")
    floats = {path: np.asarray(variable[...]) for path, variable in _named(qmodel.model)}
    _checked(file)
    trial = nnx.clone(qmodel, variables=False)  # so that an error leaves the model as it was
    wrong: list[str] = []
    found: dict[str, tuple[str, ...]] = {}

    def of_file(key: str, frozen: Frozen) -> tuple[jax.Array, ...] | None:
        source = _source(names, key, file.tensors, wrong)
        if source is None:
            return None
        format = format_of(frozen)
        tensors = [file[name] for name in _names(source)]
        if format is None or {tensor.format for tensor in tensors} != {format.name}:
            wrong.append(
                f"{key}: expected the weight format {tensors[0].format!r} of the file, got {frozen.use.setting}. Use "
                "qjax.gguf.overrides."
            )
            return None
        rows = [frozen.packed(_in_layout(frozen, tensor.parts())) for tensor in tensors]
        packed = rows[0] if not frozen.stack else [jnp.stack(arrays) for arrays in zip(*rows, strict=True)]
        if not np.array_equal(np.asarray(frozen(*packed)[0]), floats[key]):
            wrong.append(f"{key}: expected the numbers of the file, got others. Call qjax.gguf.load before quantize.")
        found[key] = _names(source)
        return tuple(packed)

    base = freeze_weights(trial, sample, train=train, lookups=True, stored=of_file)
    refuse(wrong)
    before = {path: node for path, node in nnx.iter_graph(qmodel) if isinstance(node, nnx.Variable)}
    new = {id(before[path]): node for path, node in nnx.iter_graph(trial) if isinstance(node, FrozenParam)}
    replace_variables(qmodel, lambda variable: new.get(id(variable)))
    return Loaded(found, base.left, _bytes(qmodel))


def write(
    qmodel: nnx.Module, path: str | os.PathLike[str], names: Names, *, like: GGUFFile | str | os.PathLike[str]
) -> Loaded:
    """Write the weights of a model to a GGUF file; metadata, tokenizer and formats of tensors are those of `like`.

    Codes that are frozen are written as they are; floats are quantized to the format that the tensor has in `like`, by
    the formulas of `qjax.WeightFormat`, so that they are the codes with which the model trained.

    Args:
      qmodel: a quantized model, or a float one.
      path: where the file is written, all or nothing.
      names: see `load`.
      like: a GGUF file of the same architecture.

    Raises:
      ValueError: parameters that are not in the file, shapes or formats that differ.

    Examples:
      ```python
      qjax.gguf.write(qmodel, "trained.gguf", names, like="base.gguf")
      ```
    """
    file = like if isinstance(like, GGUFFile) else read(like)
    model = qmodel.model if isinstance(qmodel, QuantizedModel) else qmodel
    wrong: list[str] = []
    data = bytearray(np.memmap(file.path, np.uint8, "r").tobytes())
    found: dict[str, tuple[str, ...]] = {}
    everything: list[tuple[str, Any]] = [*_named(model), *_frozen(model)]
    for key, variable in everything:
        source = _source(names, key, file.tensors, wrong)
        if source is None:
            continue
        for index, name in enumerate(_names(source)):
            tensor = file[name]
            step = (index,) if isinstance(source.tensors, tuple) else ()
            try:
                new = _frozen_bytes(variable, tensor, step) if isinstance(variable, FrozenParam) else None
                if new is None:
                    new = _float_bytes(np.asarray(variable[...])[step], source, key, tensor)
            except ValueError as error:
                wrong.append(f"{key}: {error}")
                continue
            data[tensor.offset : tensor.offset + len(new)] = new
        found[key] = _names(source)
    refuse(wrong)
    files.write(bytes(data), os.fspath(path))
    return Loaded(found, (), len(data))


# ---------------------------------------------------------------------------- parameters and their tensors


def _parameters(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, variable) of each float parameter."""
    return iter(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def _named(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, variable in _parameters(model):
        yield "/".join(map(str, path)), variable


def _frozen(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """(path, parameter) of each frozen parameter; one that several modules share comes once."""
    inner = model.model if isinstance(model, QuantizedModel) else model
    known = {id(parameter): parameter for _, _, parameter in frozen_parameters(inner)}
    for path, node in nnx.iter_graph(inner):
        if id(node) in known:
            yield "/".join(map(str, path)), known.pop(id(node))


def _tensors(file: GGUFFile | Mapping[str, Any]) -> Mapping[str, Any]:
    return _checked(file).tensors if not isinstance(file, Mapping) else file


def _checked(file: Any) -> GGUFFile:
    if not isinstance(file, GGUFFile):
        raise TypeError(f"qjax.gguf: expected a file that was read, got {file!r}. Read it first: qjax.gguf.read(path).")
    return file


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _names(source: Source) -> tuple[str, ...]:
    return (source.tensors,) if isinstance(source.tensors, str) else tuple(source.tensors)


def _source(names: Names, key: str, tensors: Mapping[str, Any], wrong: list[str]) -> Source | None:
    """Where a parameter is; None, and a message in `wrong` unless the caller said so, if it is nowhere."""
    try:
        found = names(key) if callable(names) else names[key]
    except (KeyError, IndexError, ValueError) as error:
        wrong.append(f"{key}: `names` has no tensor for it ({type(error).__name__}: {error}). Return None to leave it.")
        return None
    if found is None:
        return None
    source = Source(found) if isinstance(found, str) else found
    if not isinstance(source, Source):
        wrong.append(f"{key}: `names`: expected the name of a tensor or a qjax.gguf.Source, got {found!r}.")
        return None
    missing = [name for name in _names(source) if name not in tensors]
    if missing:
        wrong.append(f"{key}: the file has no tensor {missing[0]!r}.{did_you_mean(missing[0], tensors)}")
        return None
    transposed = key.rsplit("/", 1)[-1] == "kernel" if source.transposed is None else source.transposed
    return dataclasses.replace(source, transposed=transposed)


def _value(source: Source, key: str, tensors: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray | None:
    """A parameter's numbers; None if shapes differ."""
    stacked = isinstance(source.tensors, tuple)
    if stacked and shape[:1] != (len(source.tensors),):
        return None
    own = shape[1:] if stacked else shape
    values = []
    for name in _names(source):
        tensor = tensors[name]
        if not _fits(_shape(tensor), own, bool(source.transposed)):
            return None
        value = tensor.dequantize() if isinstance(tensor, Tensor) else np.asarray(tensor, np.float32)
        values.append((value.T if source.transposed else value).reshape(own))
    return np.stack(values) if stacked else values[0]


def _fits(shape: tuple[int, ...], own: tuple[int, ...], transposed: bool) -> bool:
    """Whether a parameter has the tensor's shape, where one axis may be several: heads, and the numbers of a head."""
    shape = shape[::-1] if transposed else shape
    return shape == own or (len(own) > len(shape) == 2 and any(_split_at(own, at) == shape for at in range(len(own))))


def _split_at(own: tuple[int, ...], at: int) -> tuple[int, int]:
    return int(np.prod(own[:at])), int(np.prod(own[at:]))


# ---------------------------------------------------------------------------- codes


def format_of(frozen: Frozen) -> WeightFormat | None:
    """The weight format of a frozen parameter; None if it has another quantizer."""
    setting = frozen.use.setting
    weights = setting.weights if isinstance(setting, Dynamic) else setting
    return weights if isinstance(weights, WeightFormat) else None


def _dynamic(frozen: Frozen) -> bool:
    return isinstance(frozen.use.setting, Dynamic)


def _dynamic_setting(format: WeightFormat, activations: Literal["block", "row", "llama_cpp"]) -> Dynamic:
    if activations == "row":
        return Dynamic(weights=format, per="row")
    arithmetic = "ggml_avx2" if activations == "llama_cpp" else None
    return Dynamic(weights=format, per="block", block=BLOCK, arithmetic=arithmetic)


def _in_layout(frozen: Frozen, parts: Parts) -> list[Any]:
    """Parts of a tensor (outputs, inputs) in the layout in which its product reads them."""
    use = frozen.use
    lead = tuple(use.shape[axis] for axis in use.kept)
    rows = [jnp.asarray(part).reshape(*lead, -1) for part in parts]
    if not _dynamic(frozen):
        return rows
    summed = [axis for axis in range(len(use.shape)) if axis not in use.kept]
    return [Layout(_with_size(use.shape, summed[0], part.shape[-1]), use.kept).back(part) for part in rows]


def _with_size(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _out_of_layout(frozen: Frozen, parts: list[Any]) -> Parts:
    """The inverse of `_in_layout`, as rows."""
    use = frozen.use
    rows = parts
    if _dynamic(frozen):
        (summed,) = (axis for axis in range(len(use.shape)) if axis not in use.kept)
        rows = [Layout(_with_size(use.shape, summed, part.shape[summed]), use.kept).rows(part) for part in parts]
    return tuple(np.asarray(part).reshape(-1, part.shape[-1]) for part in rows)


def _frozen_bytes(parameter: FrozenParam, tensor: Tensor, step: tuple[int, ...]) -> bytes:
    frozen: Frozen = parameter.get_metadata("frozen")
    format = format_of(frozen)
    if format is None or format.name != tensor.format:
        raise ValueError(
            f"expected the format {tensor.format!r} of {tensor.name}, got {frozen.use.setting}. Train with "
            "qjax.gguf.overrides, or take another file as `like`"
        )
    packed = [part[step] for part in parameter.get_raw_value()]
    return pack(_out_of_layout(frozen, frozen.stored(packed)), format.name).tobytes()


def _float_bytes(value: np.ndarray, source: Source, key: str, tensor: Tensor) -> bytes:
    if not _fits(tensor.shape, value.shape, bool(source.transposed)):
        raise ValueError(f"expected the shape of {tensor.name}, {tensor.shape}, got {value.shape}")
    columns = tensor.shape[-1]
    rows = value.reshape(columns, -1).T if source.transposed else value.reshape(-1, columns)
    if tensor.has_codes:
        parts = _encode(jnp.asarray(rows, jnp.float32), WeightFormat(tensor.format))
        return pack(tuple(np.asarray(part) for part in parts), tensor.format).tobytes()
    if tensor.format not in ("f32", "f16"):
        raise ValueError(
            f"{tensor.name} has the format {tensor.format!r}, which qjax does not write. Return None for it in "
            "`names`, and its bytes stay as they are in `like`"
        )
    return np.ascontiguousarray(rows, "<f4" if tensor.format == "f32" else "<f2").tobytes()


_encode = jax.jit(encode_stored, static_argnums=1)


def _bytes(model: nnx.Module) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model)))
