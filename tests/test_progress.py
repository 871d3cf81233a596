"""One line on standard error, only where somebody can see it, and gone at the end."""

import inspect
import re
import time

import jax.numpy as jnp
import pytest
from flax import nnx

import qjax
from qjax.support import progress


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(progress, "_TICK", 0.02)
    yield
    qjax.show_progress(None)


def said_within(text, capsys, **options):
    """What is written while a stage runs, as soon as there is something: a busy machine takes its time."""
    said = ""
    with progress.stage(text, **options):
        for _ in range(1000):
            said += capsys.readouterr().err
            if text in said:
                break
            time.sleep(0.02)
    return said


def test_a_slow_stage_says_what_runs_and_clears_its_line(quick, capsys):
    with progress.stage("convert", enabled=True):
        said = said_within("inner", capsys, enabled=True)
    assert re.search(r"qjax: convert > inner, \d+ s", said)
    assert capsys.readouterr() == ("", "\r\x1b[2K")


def test_a_fast_stage_says_nothing(capsys):
    with progress.stage("convert", enabled=True):
        pass
    assert capsys.readouterr() == ("", "")


def test_one_option_for_all(quick, capsys):
    with progress.stage("pipes are silent"):
        time.sleep(0.15)
    assert capsys.readouterr().err == ""
    qjax.show_progress(True)
    assert list(progress.track(range(3), "counting", enabled=None)) == [0, 1, 2]
    assert "asked for" in said_within("asked for", capsys)
    assert capsys.readouterr().err == "\r\x1b[2K"
    qjax.show_progress(False)
    with progress.stage("turned off"):
        time.sleep(0.15)
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="expected True, False or None"):
        qjax.show_progress("yes")  # pyright: ignore[reportArgumentType]


def test_a_line_fits_its_terminal_and_makes_room(quick, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    said = ""
    with progress.stage("a" * 100, enabled=True):
        for _ in range(1000):
            said += capsys.readouterr().err
            if "aaa" in said:
                break
            time.sleep(0.02)
        progress.say("made")
        out, err = capsys.readouterr()
    assert max(len(line.removeprefix("\x1b[2K")) for line in said.split("\r")) == 39
    assert out == "made\n"
    assert err.endswith("\r\x1b[2K")


def test_items_are_counted_from_one(capsys):
    assert list(progress.track("ab", "verify: batch", enabled=True)) == ["a", "b"]
    assert re.findall(r"batch \d of \d", capsys.readouterr().err) == ["batch 1 of 2", "batch 2 of 2"]


def test_the_first_of_several_batches_compiles(capsys):
    assert list(progress.track("abc", "verify: batch", enabled=True, compiles=True)) == ["a", "b", "c"]
    lines = re.findall(r"batch \d of \d[^,]*", capsys.readouterr().err)
    assert lines == ["batch 1 of 3 (compiling)", "batch 2 of 3", "batch 3 of 3"]


def test_an_error_ends_the_line(quick):
    with pytest.raises(ValueError, match="stop"), progress.stage("convert", enabled=True):
        raise ValueError("stop")
    assert progress._line.running == []


def test_every_public_call_is_silent_where_nobody_can_see_it():
    homes = [getattr(qjax, name) for name in qjax.__all__] + [
        getattr(qjax.training, name) for name in qjax.training.__all__
    ]
    found = {f.__name__: inspect.signature(f).parameters["progress"].default for f in homes if takes_progress(f)}
    assert {"quantize", "calibrate", "post_training", "gptq"} <= set(found)
    assert {name for name, default in found.items() if default is not None} == set()


def takes_progress(f):
    return inspect.isfunction(f) and "progress" in inspect.signature(f).parameters


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*a single number")
def test_the_first_call_of_a_model_says_that_it_compiles(quick, capsys, monkeypatch):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4))
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    qmodel.eval()
    seen = []
    monkeypatch.setattr("qjax.model.quantized_model.stage", lambda text: seen.append(text) or progress.stage(text))
    monkeypatch.setattr("qjax.api.exact.stage", lambda text: seen.append(text) or progress.stage(text))
    qmodel(x)
    qjax.exact(qmodel, x)(qmodel, x)
    assert seen[0] == "Linear with 3 quantizers: the first call compiles"
    assert "exact forward: the first call compiles" in seen


@pytest.mark.filterwarnings("ignore:.*a single number")
def test_the_first_call_of_a_graph_with_a_shape_says_that_it_compiles(monkeypatch):
    x = jnp.ones((2, 4))
    graph = qjax.convert(qjax.quantize(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), qjax.Recipe(), x), x)
    seen = []
    monkeypatch.setattr("qjax.export.integer_graph.stage", lambda text: seen.append(text) or progress.stage(text))
    graph(x)
    codes = graph.quantize(x)
    graph.run(codes)
    assert seen == ["compiling a graph of 1 nodes"] * 2
    graph(x)
    graph.run(codes)
    assert len(seen) == 2
    graph(jnp.ones((3, 4)))
    assert len(seen) == 3
