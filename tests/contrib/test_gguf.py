"""GGUF files: their codes enter a model, train, and leave it, with everything else of the file unchanged."""

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import quants

import qjax
from qjax.export.read_errors import ReadError
from qjax.layers.frozen import frozen_parameters
from tests.contrib.gguf_models import (
    HIDDEN,
    TOKENS,
    VOCABULARY,
    WIDE,
    WIDTH,
    Net,
    Wide,
    names,
    write_file,
    write_wide_file,
)

pytestmark = pytest.mark.filterwarnings("ignore:quantize. parts under qjax.Dynamic stay in float")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def quantized(path: Path, **kwargs: Any) -> tuple[Any, Any]:
    file, model = qjax.gguf.read(path), Net()
    qjax.gguf.load(model, file, names)
    recipe = qjax.Recipe(overrides=qjax.gguf.overrides(file, names, model, **kwargs))
    return file, qjax.quantize(model, recipe, TOKENS)


def test_a_file_is_read(path: Path) -> None:
    file = qjax.gguf.read(path)
    assert str(file) == "llama: 2 f32, 2 q4_0, 2 q4_1, 2 q5_0, 2 q5_1, 1 q8_0"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    tensor = file["blk.1.gate.weight"]
    codes, scales, minimums = tensor.parts()
    assert (codes.shape, scales.shape, minimums.shape) == ((HIDDEN, WIDTH), (HIDDEN, 2), (HIDDEN, 2))
    spread = [np.repeat(part, 32, axis=1) for part in (scales, minimums)]
    np.testing.assert_array_equal(codes * spread[0] + spread[1], tensor.dequantize())
    with pytest.raises(KeyError, match=r"no tensor 'blk.1.gat.weight'. Did you mean 'blk.1.gate.weight'"):
        file["blk.1.gat.weight"]


@pytest.mark.parametrize("activations", ["block", "row", "float"])
def test_codes_enter_and_leave_unchanged(path: Path, tmp_path: Path, activations: str) -> None:
    file, qmodel = quantized(path, activations=activations)
    for key in ("up", "query"):
        kernel = getattr(qmodel.model.blocks[1], key).kernel[...]
        np.testing.assert_array_equal(kernel.reshape(WIDTH, -1).T, file[f"blk.1.{key}.weight"].dequantize())
    loaded = qjax.gguf.freeze(qmodel, TOKENS, file, names, train=())
    assert not loaded.left
    assert loaded.parameters["embed/embedding"] == ("token_embd.weight",)
    for _, _, parameter in frozen_parameters(qmodel):
        frozen = parameter.get_metadata("frozen")
        np.testing.assert_array_equal(frozen(*parameter.get_raw_value())[0], parameter.thawed()[...])
    logits = nnx.jit(lambda m, x: m(x))(qmodel, TOKENS)
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, TOKENS))(qmodel, TOKENS), logits)
    if activations == "float":
        graph = qjax.convert(qmodel, TOKENS)
        graph.save(tmp_path / "model.qjax")
        np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(TOKENS), logits)
        model = Net()
        qjax.gguf.load(model, file, names)
        np.testing.assert_allclose(logits, model(jnp.asarray(TOKENS)), rtol=1e-4, atol=1e-4)
    qjax.gguf.write(qmodel, tmp_path / "out.gguf", names, like=path)
    assert (tmp_path / "out.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("formats", "activations"),
    [(("q6_k", "q4_k", "q6_k"), "block"), (("q5_k", "q3_k", "q2_k"), "row"), (("q6_k", "q4_k", "q5_k"), "float")],
)
def test_codes_of_k_formats_enter_and_leave_unchanged(
    tmp_path: Path, formats: tuple[str, str, str], activations: Any
) -> None:
    write_wide_file(tmp_path / "model.gguf", *formats)
    file, model = qjax.gguf.read(tmp_path / "model.gguf"), Wide()
    qjax.gguf.load(model, file, WIDE)
    floats = model(jnp.asarray(TOKENS))
    recipe = qjax.Recipe(overrides=qjax.gguf.overrides(file, WIDE, model, activations=activations))
    qmodel: Any = qjax.quantize(model, recipe, TOKENS)
    loaded = qjax.gguf.freeze(qmodel, TOKENS, file, WIDE, train=())
    assert (set(loaded.parameters), loaded.left) == (set(WIDE), ())
    logits = nnx.jit(lambda m, x: m(x))(qmodel, TOKENS)
    error = np.linalg.norm(logits - floats) / np.linalg.norm(floats)
    assert error < (1e-5 if activations == "float" else 0.02)
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, TOKENS))(qmodel, TOKENS), logits)
    graph = qjax.convert(qmodel, TOKENS)
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(TOKENS), logits)
    qjax.gguf.write(qmodel, tmp_path / "out.gguf", WIDE, like=file)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_what_was_trained_is_written(path: Path, tmp_path: Path) -> None:
    _, qmodel = quantized(path)
    kernel = qmodel.model.blocks[0].gate.kernel
    kernel[...] = kernel[...] * 1.5 + 0.01
    qmodel.model.blocks[0].norm.scale[...] = jnp.full(WIDTH, 2.0)
    qjax.gguf.write(qmodel, tmp_path / "out.gguf", names, like=path)
    after = qjax.gguf.read(tmp_path / "out.gguf")
    expected = quants.quantize(np.asarray(kernel[...]).T, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(after["blk.0.gate.weight"].data, expected)
    np.testing.assert_array_equal(after["blk.0.norm.weight"].dequantize(), 2)
    np.testing.assert_array_equal(after["blk.1.gate.weight"].data, qjax.gguf.read(path)["blk.1.gate.weight"].data)
    # the codes of the written file, in a model that loads it, are those with which this one computed
    again = Net()
    qjax.gguf.load(again, after, names)
    recipe = qjax.Recipe(overrides=qjax.gguf.overrides(after, names, again))
    shipped: Any = qjax.quantize(again, recipe, TOKENS)
    qjax.gguf.freeze(shipped, TOKENS, after, names, train=())
    qjax.training.freeze_base(qmodel, TOKENS, train=())
    theirs, ours = ([p.get_raw_value() for _, _, p in frozen_parameters(m.model.blocks)] for m in (shipped, qmodel))
    assert len(theirs) == 8
    jax.tree.map(np.testing.assert_array_equal, theirs, ours)


class Tied(nnx.Module):
    """Returns what it looks up, too."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.embed(tokens)
        return x, self.embed.attend(x)


@pytest.mark.parametrize("activations", ["block", "float"])
def test_rows_of_a_frozen_table_are_those_of_the_file(path: Path, activations: str) -> None:
    file, model = qjax.gguf.read(path), Tied()
    tied, table = {"embed/embedding": "token_embd.weight"}, file["token_embd.weight"].dequantize()
    qjax.gguf.load(model, file, tied, unused=set(file.tensors) - set(tied.values()))
    recipe = qjax.Recipe(overrides=qjax.gguf.overrides(file, tied, model, activations=activations))
    qmodel = qjax.quantize(model, recipe, TOKENS)
    forward = nnx.jit(lambda m, x: m(x))
    rows, logits = forward(qmodel, TOKENS)
    qjax.gguf.freeze(qmodel, TOKENS, file, tied, train=())
    assert not nnx.state(qmodel, nnx.Param)
    again, same = forward(qmodel, TOKENS)
    np.testing.assert_array_equal(rows, table[TOKENS])
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(same, logits)
    # a negative token counts from the end, and one outside of the table is NaN, as in float
    strange = np.array([[-1, -VOCABULARY, -VOCABULARY - 1, VOCABULARY]], np.int32)
    np.testing.assert_array_equal(forward(qmodel, strange)[0], model(jnp.asarray(strange))[0])


def test_stacked_layers_take_a_tensor_each(path: Path, tmp_path: Path) -> None:
    class Scanned(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Param(jnp.zeros((2, WIDTH, HIDDEN)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, w: (nnx.relu(x @ w)[..., :WIDTH], None), x, self.up[...])[0]

    layers = {"up": qjax.gguf.Source(("blk.0.up.weight", "blk.1.up.weight"), transposed=True)}
    file, model, x = qjax.gguf.read(path), Scanned(), np.ones((3, WIDTH), np.float32)
    unused = [name for name in file.tensors if ".up." not in name]
    qjax.gguf.load(model, file, layers, unused=unused)
    qmodel = qjax.quantize(model, qjax.Recipe(overrides={".*": qjax.WeightFormat("q4_0")}), x)
    before = qmodel(x)
    qjax.gguf.freeze(qmodel, x, file, layers, train=())
    assert not np.array_equal(qmodel(x), before)  # the file's scales are not those that the formula chooses
    np.testing.assert_allclose(qmodel(x), model(jnp.asarray(x)), rtol=1e-5)
    qjax.gguf.write(qmodel, tmp_path / "out.gguf", layers, like=file)
    assert (tmp_path / "out.gguf").read_bytes() == path.read_bytes()


def test_arrays_by_name_are_loaded_too() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
    qjax.gguf.load(model, arrays, {"kernel": "w", "bias": "b"})
    np.testing.assert_array_equal(model.kernel[...], arrays["w"].T)


def test_what_does_not_fit_is_refused(path: Path, tmp_path: Path) -> None:
    file, model = qjax.gguf.read(path), Net()
    before = model.embed.embedding[...]
    with pytest.raises(ValueError, match=r"blocks/0/down/kernel: the file has no tensor 'blk.0.dwn.weight'. Did you"):
        qjax.gguf.load(model, file, lambda key: names(key).replace("down", "dwn"))
    with pytest.raises(ValueError, match=r"blocks/0/up/kernel: expected 64x96, got blk.0.down.weight 64x96"):
        qjax.gguf.load(model, file, lambda key: names(key).replace("up", "down"))
    with pytest.raises(ValueError, match=r"2 tensors of the file belong to no parameter: blk.0.norm.weight, .*unused="):
        qjax.gguf.load(model, file, lambda key: None if "norm" in key else names(key))
    with pytest.raises(ValueError, match=r"unused: the file has no tensor 'rope'"):
        qjax.gguf.load(model, file, names, unused=["rope"])
    np.testing.assert_array_equal(model.embed.embedding[...], before)
    # codes of another grid than that of training
    qjax.gguf.load(model, file, names)
    nf4: Any = qjax.quantize(model, qjax.Recipe(overrides={".*": qjax.WeightFormat("nf4", 32)}), TOKENS)
    with pytest.raises(ValueError, match=r"expected the weight format 'q4_0' of the file, got nf4"):
        qjax.gguf.freeze(nf4, TOKENS, file, names, train=())
    assert nf4.model.blocks[0].up.kernel[...].dtype == np.float32  # an error changes nothing
    other, qmodel = quantized(path)
    qmodel.model.blocks[0].up.kernel[...] = qmodel.model.blocks[0].up.kernel[...] + 1
    with pytest.raises(ValueError, match=r"blocks/0/up/kernel: expected the numbers of the file, got others"):
        qjax.gguf.freeze(qmodel, TOKENS, other, names, train=())
    with pytest.raises(TypeError, match=r"expected a file that was read, got .*model.gguf.*qjax.gguf.read\(path\)"):
        qjax.gguf.overrides(str(path), names, model)  # pyright: ignore[reportArgumentType]
    narrow = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="kernel: its dtype bfloat16 does not hold the numbers of w"):
        qjax.gguf.load(narrow, {"w": np.full((2, 3), 0.1, np.float32)}, {"kernel": "w"})
    pair: Any = nnx.Module()
    pair.up, pair.gate = (nnx.Param(jnp.zeros((HIDDEN, WIDTH))) for _ in range(2))
    with pytest.raises(ValueError, match=r"up: expected q4_\d, .* another weight of its module has, got q4_\d"):
        qjax.gguf.overrides(file, lambda key: f"blk.0.{key}.weight", pair, activations="float")
    data = path.read_bytes()
    for cut in (0, 3, 40, 200, len(data) // 2):
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(ReadError, match=r"cut.gguf"):
            qjax.gguf.read(tmp_path / "cut.gguf")
    with pytest.raises(FileNotFoundError, match="expected a GGUF file, but there is none"):
        qjax.gguf.read(tmp_path / "none.gguf")
