"""Tables of embeddings with scales of their rows: trained, converted and emitted with the same bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.numerics.affine import dequantize, quantize

TOKENS = np.random.default_rng(0).integers(0, 12, (5, 6))
SPECS = {
    "rows": qjax.QSpec(bits=4, axis=0),
    "asymmetric": qjax.QSpec(bits=8, axis=0, symmetric=False),
    "groups of rows": qjax.QSpec(bits=4, group_size=3),
    "groups of columns": qjax.QSpec(bits=4, axis=0, group_size=4, group_axis=1),
}


class Net(nnx.Module):
    """Rows from 0.001 to 60 in size, as a vocabulary has rare words and frequent ones."""

    def __init__(self):
        self.words = nnx.Embed(12, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(2))
        sizes = jnp.exp(jnp.arange(12.0) - 6)[:, None]
        self.words.embedding.set_value(self.words.embedding[...] * sizes * 0.5)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.words(tokens)))


def quantized(spec, model=None, **fields):
    recipe = qjax.Recipe(overrides={"words/embedding": spec}, **fields)
    qmodel = qjax.quantize(Net() if model is None else model, recipe, TOKENS)
    qmodel.eval()
    return qmodel


@pytest.mark.parametrize("name", [n if n == "rows" else pytest.param(n, marks=pytest.mark.exhaustive) for n in SPECS])
def test_bits_are_the_same_everywhere(name, tmp_path):
    qmodel = quantized(SPECS[name])
    graph = qjax.convert(qmodel, TOKENS)
    assert [node.op for node in graph.ir.nodes] == ["embed_rows", "dot"]
    expected = graph(TOKENS)
    np.testing.assert_array_equal(qjax.exact(qmodel, TOKENS)(qmodel, TOKENS), expected)
    report = qjax.verify(graph, qmodel, [TOKENS], runtimes={"onnxruntime": {"style": "integer"}, "c": {}})
    assert report.exact, str(report)
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(TOKENS), expected)


def test_another_target_is_that_of_a_conversion():
    qmodel = quantized(SPECS["rows"])
    graph = qjax.convert(qmodel, TOKENS).retarget("tflite_micro")
    np.testing.assert_array_equal(graph(TOKENS), qjax.convert(qmodel, TOKENS, target="tflite_micro")(TOKENS))
    assert graph.ir.nodes[0].attributes["rounding"] == qjax.targets.get("tflite_micro").rounding.value


@pytest.mark.exhaustive
def test_every_row_is_as_fine_as_its_size_allows():
    reals = np.asarray(Net().words.embedding[...])
    codes = {}
    for name, spec in {"rows": SPECS["rows"], "one": qjax.QSpec(bits=4)}.items():
        qmodel = quantized(spec)
        params = qmodel.qparams()["words/embedding"]
        table = quantize(reals, params)
        codes[name] = np.asarray(dequantize(table, params))
        assert params.scale.shape == ((12,) if name == "rows" else ())
    size = np.linalg.norm(reals, axis=1)
    errors = {name: np.linalg.norm(table - reals, axis=1) / size for name, table in codes.items()}
    assert errors["rows"].max() < 0.15
    assert (errors["one"] > 0.99).sum() >= 6  # all zeros


def test_packed_codes():
    graph = qjax.convert(quantized(SPECS["groups of columns"]), TOKENS)
    (weights,) = [graph.ir.tensors[name] for node in graph.ir.nodes[:1] for name in [node.constants["weights"]]]
    assert weights.shape == (12, 2, 4)
    assert weights.quantization is not None
    assert (weights.quantization.qmin, weights.quantization.qmax, weights.quantization.axes) == (-7, 7, (0, 1))


def test_training_moves_rows_and_scales():
    qmodel = quantized(SPECS["rows"])
    loss = lambda qmodel: (qmodel(TOKENS) ** 2).mean()  # noqa: E731
    grads = nnx.grad(loss)(qmodel)
    read = np.isin(np.arange(12), TOKENS)
    table = np.asarray(grads["model"]["words"]["embedding"][...])
    assert (np.abs(table[read]).sum(axis=1) > 0).any()
    assert (table[~read] == 0).all()
    scales = qmodel.quantizers.named(grads["quantizers"])["words/embedding"]["log2_scale"]
    assert scales.shape == (12,)
    assert (scales != 0).any()


def test_a_recipe_for_all_layers_leaves_tables_alone():
    qmodel = qjax.quantize(Net(), qjax.Recipe(weights=qjax.QSpec(bits=8, axis=-1)), TOKENS)
    qmodel.eval()
    assert [node.op for node in qjax.convert(qmodel, TOKENS).ir.nodes] == ["embed", "clamp", "dot"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (qjax.QSpec(axis=(0, 1)), r"expected axis=0 \(scales along the table's rows\), got axis=\(0, 1\)"),
        (qjax.QSpec(axis=1), r"expected scales along the output channels"),
        (qjax.QSpec(group_size=5), r"can have groups of 5.*'words/embedding' \(embed_rows\) groups of 4"),
    ],
)
def test_other_scales_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        quantized(spec)


@pytest.mark.exhaustive
def test_tflite_refuses(tmp_path):
    graph = qjax.convert(quantized(SPECS["rows"], target="tflite_micro"), TOKENS)
    with pytest.raises(Exception, match="whose rows have different scales"):
        graph.emit("tflite", tmp_path / "model.tflite")
