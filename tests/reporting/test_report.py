"""The page is whole by itself, says what the functions that it rests on say, and holds no markup of users."""

import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import qjax
from qjax.reporting.document import Document
from qjax.reporting.page import asset, page
from qjax.reporting.report import collect, with_training
from tests.reporting.models import HOSTILE, agreement, data, quantized

ROOT = Path(__file__).parents[2]


class _Elements(HTMLParser):
    """Start tags with their attributes, and whether every element is closed in order."""

    VOID = ("meta", "link", "img", "br", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text: str) -> _Elements:
    parser = _Elements()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def qmodel():
    return quantized()


@pytest.fixture(scope="module")
def graph(qmodel):
    return qjax.convert(qmodel, data())


@pytest.fixture(scope="module")
def found():
    """What the public functions said to the report, by name."""
    return {}


@pytest.fixture(scope="module")
def of_model(qmodel, found):
    with pytest.MonkeyPatch.context() as patch:
        for name, function in (("statistics", qjax.statistics), ("verify", qjax.verify)):

            def recorded(*args, name=name, function=function, **options):
                return found.setdefault(name, function(*args, **options))

            patch.setattr(f"qjax.reporting.of_model.{name}", recorded)
        labels = np.zeros(24, np.int32)
        return collect(qmodel, [(data(), labels)], inputs=lambda batch: batch[0], metric=agreement)


@pytest.fixture(scope="module")
def of_pair(graph):
    return collect((graph, graph.retarget("tflite_xnnpack")), [data()])


def node(document: Document, name: str):
    return next(one for one in document.nodes if one["name"] == name)


def test_a_models_figures_are_those_of_the_public_functions(qmodel, graph, of_model, found):
    verified, stats = found["verify"], found["statistics"]
    assert of_model.state == ("exact" if verified.exact else "equal")
    assert ("codes that differ", f"{verified.local:,} of {verified.compared:,}") in [c[:2] for c in of_model.cards]
    assert dict(of_model.details)["Exactness: the whole verdict of qjax.verify"] == verified.verdict
    for tensor in stats.tensors:
        if tensor.kind == "activation":
            measures = node(of_model, tensor.name)["measures"]
            assert measures["total"] == float(f"{tensor.float_sqnr:.6g}")
            assert measures["arising"] == float(f"{tensor.sqnr:.6g}")
            assert measures["arriving"] == float(f"{tensor.arriving_sqnr:.6g}")
    float_model, graphs = (np.asarray(f(data()), np.float64) for f in (qmodel.model, graph))
    decibels = 10 * np.log10(np.sum(float_model**2) / np.sum((graphs - float_model) ** 2))
    assert ("output head", f"{decibels:.1f} dB") in [card[:2] for card in of_model.cards]
    metric = float(agreement(graph(data()), (None, jnp.zeros(24, jnp.int32))))
    assert of_model.cards[0][:2] == ("metric of the graph", f"{metric:.4g}")


def test_a_node_has_its_line_its_rounding_and_its_tensors(of_model):
    second = node(of_model, "second")
    assert second["source"] == "return self.head(x + nnx.gelu(self.second(x)))"
    assert dict(second["facts"])["rounding"].startswith("double_round: rounds twice")
    kernel = of_model.tensors["second/kernel"]
    assert (kernel["bits"], kernel["scales"], len(kernel["scale"])) == (4, 8, 8)
    assert sum(kernel["histogram"]["after"]) == sum(kernel["histogram"]["before"]) == 64
    assert second["accumulator"]["worst"] >= second["accumulator"]["partial"]


def test_the_curves_of_a_training_run():
    log = qjax.training.TrainingLog()
    for step in (0, 10):
        log.write_scalars(step, {"loss": 1.0 - step / 20, f"scale/{HOSTILE}": 0.5})
    document = with_training(Document("title", "graph", "unknown", "", (), (), (), (), {}, ()), log)
    written = page(document)
    assert [tag for tag, _ in parsed(written).found].count("polyline") == 2
    assert HOSTILE not in written
    assert ("loss", "1", "0.5", "0.5", "0.5", "1") in document.tables[-1].rows


def test_two_graphs(graph, of_pair):
    comparison = qjax.compare(graph, graph.retarget("tflite_xnnpack"), [data()])
    assert of_pair.headline == comparison.conclusion
    assert [n["name"] for n in of_pair.nodes if n.get("first")] == ([comparison.first.name] if comparison.first else [])
    for found in comparison.nodes:
        assert node(of_pair, found.name)["measures"]["own"] == float(
            f"{100 * found.own.count / found.own.compared:.6g}"
        )
    assert dict(node(of_pair, "head")["other"])["rounding"].startswith("float32")


@pytest.mark.exhaustive
def test_a_graph_with_and_without_data(graph):
    bare, seen = collect(graph), collect(graph, [data()])
    assert [m.key for m in bare.measures] == ["bits", "headroom", "bytes", "macs"]
    codes = np.asarray(graph.run(graph.quantize(data())))
    assert seen.tensors["head"]["histogram"]["after"] == [
        int(n)
        for n in np.add.reduceat(np.bincount(codes.reshape(-1).astype(int) + 128, minlength=256), range(0, 256, 2))
    ]
    assert node(seen, "head")["measures"]["used"] == float(f"{100 * len(np.unique(codes)) / 256:.6g}")


def test_the_page_needs_nothing_from_elsewhere(of_model, of_pair, tmp_path, graph):
    for document in (of_model, of_pair):
        elements = parsed(page(document)).found
        assert not [tag for tag, _ in elements if tag in ("link", "img", "iframe", "object")]
        loaded = [
            a for _, attributes in elements for a in ("src", "href") if not (attributes.get(a) or "#").startswith("#")
        ]
        assert loaded == []
    path = qjax.report(graph, path=tmp_path / "graph.html")
    assert path.stat().st_size < 600_000


def test_names_and_lines_are_text(of_model):
    hostile = dict(node(of_model, "second"), name=HOSTILE, source=HOSTILE, location=HOSTILE)
    table = of_model.tables[0]
    changed = dataclasses.replace(
        of_model,
        title=HOSTILE,
        headline=HOSTILE,
        cards=[(HOSTILE, HOSTILE, HOSTILE)],
        advice=[HOSTILE],
        nodes=[hostile],
        tables=[dataclasses.replace(table, title=HOSTILE, header=[HOSTILE], rows=[[HOSTILE]], nodes=[HOSTILE])],
        details=[(HOSTILE, HOSTILE)],
    )
    text = page(changed)
    assert "<img" not in text
    assert [tag for tag, _ in parsed(text).found].count("script") == 2
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert held is not None
    assert json.loads(held[1])["nodes"][0]["name"] == HOSTILE


def test_notebooks_show_escaped_tables(qmodel, graph, of_pair):
    comparison = qjax.compare(graph, graph, [data()])
    for shown in (qmodel.summary(), qjax.accumulators(graph), comparison):
        elements = parsed(shown._repr_html_())
        assert [tag for tag, _ in elements.found].count("table") == 1
    evil = dataclasses.replace(comparison, nodes=(dataclasses.replace(comparison.nodes[0], name=HOSTILE),))
    assert "<img" not in evil._repr_html_()
    assert HOSTILE in str(evil)


def test_mistakes_are_named(qmodel, graph):
    with pytest.raises(TypeError, match="expected batches"):
        collect(qmodel)
    with pytest.raises(ValueError, match="no float model"):
        collect(graph, [data()], metric=agreement)
    with pytest.raises(TypeError, match="two graphs"):
        collect((graph, qmodel), [data()])
    with pytest.raises(TypeError, match="quantized model"):
        collect(qmodel.model, [data()])


def test_the_committed_script_is_built_from_the_committed_sources():
    """tools/report.sh rebuilds it; its first line names the sources that it was built from."""
    folder = ROOT / "tools" / "report"
    digest = hashlib.sha256()
    names = ["package-lock.json", *(f"src/{path.name}" for path in sorted((folder / "src").iterdir()))]
    for name in names:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    assert asset("report.js").splitlines()[0] == f"/* sources {digest.hexdigest()} */"
    assert "ISC" in asset("licences.txt")
    assert "</script" not in asset("report.js")
