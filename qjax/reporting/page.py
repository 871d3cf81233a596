"""Renders a document as one HTML file: verdict and tables are plain HTML, and the script draws the graph and plots.

The page loads nothing: its Content-Security-Policy forbids every connection, and allows the one script by its hash.
All user text (names, lines of code) is escaped, in HTML and in the JSON that the script reads.
"""

import base64
import hashlib
import json
from importlib.resources import files

from qjax.reporting.document import Document, Table
from qjax.support.markup import numeric, text
from qjax.support.version import __version__

_STATES = {
    "exact": "exact",
    "equal": "the graph is bit-identical to qjax.exact",
    "differs": "differs",
    "unknown": "not compared",
}


def page(document: Document) -> str:
    """Render the whole file."""
    script, style, licences = (asset(name) for name in ("report.js", "report.css", "licences.txt"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="qjax {text(__version__)}">',
            f"<title>{text(document.title)} - qjax report</title>",
            f"<style>{style}</style></head><body>",
            '<a class="skip" href="#verdict">Skip to the verdict</a>',
            _header(document),
            "<main>",
            _verdict(document),
            _network(document) if document.nodes else "",
            document.extra,
            *(_table(table, index) for index, table in enumerate(document.tables) if table.rows),
            *(_details(title, content) for title, content in document.details if content),
            "</main>",
            _footer(licences),
            f'<script type="application/json" id="data">{embedded(document)}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def asset(name: str) -> str:
    """Read a file of `assets/`."""
    return files("qjax.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def embedded(document: Document) -> str:
    """The data as JSON for a script element: no character in it can end the element."""
    found = json.dumps(document.data(), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return found.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _header(document: Document) -> str:
    return (
        f'<header><h1>{text(document.title)}</h1><div class="tools">'
        '<button type="button" id="theme">Dark colours</button>'
        '<button type="button" id="print">Print</button></div></header>'
    )


def _verdict(document: Document) -> str:
    cards = "".join(
        f'<div class="card"><dt>{text(label)}</dt><dd><b>{text(value)}</b><span>{text(note)}</span></dd></div>'
        for label, value, note in document.cards
    )
    advice = "".join(f"<li>{text(line)}</li>" for line in document.advice)
    parts = [
        f'<section id="verdict" class="verdict {text(document.state)}" aria-labelledby="verdict-title">',
        f'<h2 id="verdict-title"><span class="badge">{text(_STATES[document.state])}</span> Verdict</h2>',
        f'<p class="headline">{text(document.headline)}</p><dl class="cards">{cards}</dl>',
    ]
    if advice:
        parts.append(f'<h3>What to do next</h3><ol class="advice">{advice}</ol>')
    return "".join([*parts, "</section>"])


def _network(document: Document) -> str:
    options = "".join(
        f'<option value="{text(measure.key)}">{text(measure.label)}</option>' for measure in document.measures
    )
    return (
        '<section id="network" aria-labelledby="network-title"><h2 id="network-title">Network</h2>'
        '<div class="controls"><label>Colour by <select id="measure">' + options + "</select></label>"
        '<label>Search <input id="search" type="search" placeholder="node, operation, line" autocomplete="off"></label>'
        '<span id="found" role="status"></span>'
        '<span class="buttons"><button type="button" id="zoom-in" aria-label="Zoom in">+</button>'
        '<button type="button" id="zoom-out" aria-label="Zoom out">&minus;</button>'
        '<button type="button" id="fit">Fit</button></span></div>'
        '<p id="help" class="note"></p><div class="split"><div id="graph"></div>'
        '<aside id="panel" tabindex="0" aria-live="polite" aria-label="Selected node">'
        '<p class="note">Choose a node: click it, or move to it with Tab or the arrow keys and press Enter.</p>'
        "<noscript><p>The graph and the plots need JavaScript; the tables below do not.</p></noscript>"
        "</aside></div></section>"
    )


def _table(table: Table, index: int) -> str:
    cells = [[str(value) for value in row] for row in table.rows]
    right = [all(numeric(row[i]) for row in cells) for i in range(len(table.header))]
    heads = "".join(
        f'<th scope="col" class="{"right" if r else ""}"><button type="button">{text(name)}</button></th>'
        for name, r in zip(table.header, right, strict=True)
    )
    rows: list[str] = []
    for row, node in zip(cells, table.nodes, strict=True):
        first = f'<th scope="row">{text(row[0])}</th>'
        if node is not None:
            first = f'<th scope="row"><a href="#network" data-node="{text(node)}">{text(row[0])}</a></th>'
        rest = "".join(
            f'<td class="{"right" if r else ""}">{text(value)}</td>'
            for value, r in zip(row[1:], right[1:], strict=True)
        )
        rows.append(f"<tr>{first}{rest}</tr>")
    name = f"table-{index}"
    note = f'<p class="note">{text(table.note)}</p>' if table.note else ""
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{text(table.title)}</h2>{note}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.title)}, rows">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _details(title: str, content: str) -> str:
    return f"<section><details><summary>{text(title)}</summary><pre>{text(content)}</pre></details></section>"


def _footer(licences: str) -> str:
    return (
        f"<footer><p>Made by qjax {text(__version__)}. This file needs no network and contains no tracking.</p>"
        f"<details><summary>Licences of the libraries inside</summary><pre>{text(licences)}</pre></details></footer>"
    )
