"""The guard of artifacts: what it hashes, and what it says of entries that moved."""

import dataclasses
import json
import re

import numpy as np
import pytest

from experiments import bits
from qjax import ops, targets
from tests.export.graphs import rich_graph


def test_text_holds_every_bit_and_no_place():
    graph = rich_graph()
    held = graph.tensors["s16"]
    changed = np.asarray(held.value).copy()
    changed[0] += 1
    other = graph.replace(tensors={**graph.tensors, "s16": dataclasses.replace(held, value=changed)})
    assert bits.text(other) != bits.text(graph)
    moved = graph.replace(nodes=tuple(dataclasses.replace(node, location="a.py:1") for node in graph.nodes))
    assert bits.text(moved) == bits.text(graph)
    assert all(node.location is None for node in bits.without_places(graph).nodes)


def test_modules_hold_no_place():
    module = bits.artifacts(rich_graph(), "rich", False)["stablehlo"]()
    assert "stablehlo.gather" in module
    assert not re.search(r"\bloc|#loc", module)


def test_moved_entries_are_listed(monkeypatch, tmp_path, capsys):
    graph = rich_graph()
    monkeypatch.setattr(bits, "graphs", lambda quick: {"rich": lambda: graph})
    monkeypatch.setattr(bits, "NEVER", {*ops.names(), *targets.names()})
    path = tmp_path / "bits.json"
    assert bits.main(["--write", str(path)]) == 0
    assert bits.main(["--against", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rich: onnx qdq"] == "ValueError"
    path.write_text(json.dumps({**found, "rich: qjax": "0" * 16}))
    capsys.readouterr()
    assert bits.main(["--against", str(path)]) == 1
    assert f"rich: qjax: {'0' * 16} -> {found['rich: qjax']}\n1 of {len(found)}" in capsys.readouterr().out


def test_an_operation_without_a_graph_is_an_error(monkeypatch):
    monkeypatch.setattr(bits, "graphs", lambda quick: {"rich": rich_graph})
    with pytest.raises(ValueError, match=r"got none of add, .*, conv, "):
        bits.entries(quick=True)
