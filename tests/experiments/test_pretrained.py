"""The model of `experiments.pretrained`, on a small file of its form."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import quants

import qjax
from experiments.pretrained import __main__ as pretrained
from experiments.pretrained import llama

WIDTH, HIDDEN, VOCABULARY = 32, 64, 40
KEYS = {
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "block_count": 2,
    "vocab_size": VOCABULARY,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


@pytest.fixture
def file(tmp_path: Path) -> qjax.gguf.GGUFFile:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in KEYS.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    matrices = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    matrices |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        w = (rng.normal(size=shape) / 4).astype(np.float32)
        writer.add_tensor(name, quants.quantize(w, kind), raw_dtype=kind)

    add("token_embd.weight", (VOCABULARY, WIDTH), gguf.GGMLQuantizationType.Q8_0)
    for layer in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", rng.normal(size=WIDTH).astype(np.float32))
        for name, shape in matrices.items():
            add(f"blk.{layer}.{name}.weight", shape, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return qjax.gguf.read(tmp_path / "model.gguf")


def test_the_first_token_apart_changes_nothing_in_float(file: qjax.gguf.GGUFFile) -> None:
    model = llama.loaded(file)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 7)).astype(np.int32)
    whole = model(jnp.asarray(np.concatenate([np.full((2, 1), 3, np.int32), tokens], axis=1)))[:, 1:]
    np.testing.assert_allclose(llama.with_first_token(model, 3)(jnp.asarray(tokens)), whole, rtol=1e-4, atol=1e-4)
    one = llama.loaded(file, layers=1)
    assert len(one.blocks) == 1


def test_settings_of_the_table_run(file: qjax.gguf.GGUFFile) -> None:
    model = llama.loaded(file)
    pieces = np.random.default_rng(1).integers(0, VOCABULARY, (4, 8)).astype(np.int32)
    texts = pieces[:2], pieces[2:]
    recipes = pretrained.recipes(file, model)
    assert len(recipes) == 13
    float_row = pretrained.Row("float")
    best = pretrained.measured(float_row, model, texts[0], np.zeros(0)).argmax(-1)
    row = pretrained.Row("the file's codes, int8 in blocks of 32", float_row.perplexity)
    frozen = pretrained.quantized(row, recipes[row.setting], model, file, texts, best)
    assert not [path for path, p in nnx.to_flat_state(nnx.state(frozen, nnx.Param)) if p.size > WIDTH]
    assert row.bytes < float_row.bytes / 3
    assert abs(row.perplexity / float_row.perplexity - 1) < 0.1
    name = f"W8A8 in integers, norms and sums of 16 bits, {pretrained.APART}"
    row = pretrained.Row(name, float_row.perplexity)
    qmodel = pretrained.quantized(row, recipes[name], llama.with_first_token(model, 3), file, texts, best)
    pretrained.compared(row, qmodel, texts[0][:1])
    assert (row.outputs, row.differ) == (8 * VOCABULARY, 0)
    assert name in pretrained.table([float_row, row])
