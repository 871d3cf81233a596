"""The rows of `experiments.files` as a page for docs/."""

from collections.abc import Iterable, Mapping, Sequence

from experiments.files.row import TARGETS, Count, Row

COLUMNS = ("file", "inputs", "operators", "nodes", "reference", "XNNPACK", "Micro", "C", "ONNX")

PAGE = """# Public files, read unchanged

`python -m experiments.files FOLDER --page {path}` wrote this page. FOLDER contains checkouts of the repositories
below as OWNER/NAME; `python -m experiments.files --help` explains how to make it. The files were quantized by other
projects with their own tools.

{summary}

| column | meaning |
| --- | --- |
| nodes | number of nodes of the integer graph |
| reference | codes of any tensor that differ from LiteRT's reference kernels, of those compared in three calls |
| XNNPACK | the same for output codes and LiteRT's default kernels |
| Micro | the same for output codes and TFLite Micro |
| C | output codes of the emitted C that differ from the graph's, in one call |
| ONNX | output codes of the graph retargeted to ONNX Runtime that differ when that runtime runs the .onnx file |

A file marked "(part)" was read up to some tensors with `outputs=`, because what follows them has no integer form.
A dash means that there is nothing to compare; the second table of a repository explains why. {left}

{tables}
{machine}
"""


def _cell(count: Count) -> str:
    return "-" if not count.compared else f"{count.differ:,} of {count.compared:,}"


def _name(row: Row) -> str:
    return row.path.rsplit("/", 1)[-1].removesuffix(".tflite")


def line(row: Row) -> str:
    """A row for the console."""
    if row.error:
        return f"{row.repository} {row.path}: refused. {row.error}"
    counts = [f"{name} {_cell(count)}" for name, count in (*row.counts.items(), ("C", row.c), ("ONNX", row.onnx))]
    return (
        f"{row.repository} {row.path}: {row.operators} operators{', a part' if row.part else ''}; {'; '.join(counts)}"
    )


def _all(rows: Iterable[Row]) -> list[Count]:
    return [count for row in rows for count in (*row.counts.values(), row.c, row.onnx)]


def summary(rows: Sequence[Row]) -> str:
    """One line about all rows."""
    read = [row for row in rows if not row.error]
    parts = sum(bool(row.part) for row in read)
    counts = _all(read)
    return (
        f"Of {len(rows)} different quantized files, {len(read) - parts} are read whole and {parts} in part. "
        f"Of {sum(c.compared for c in counts):,} codes, {sum(c.differ for c in counts):,} differ."
    )


def page(
    rows: Sequence[Row],
    left: Mapping[str, int],
    path: str,
    made: Mapping[str, object],
    commits: Mapping[str, str] | None = None,
) -> str:
    """The page. Files of one operator have one line together, by folder and operator; commits: by repository."""
    tables: list[str] = []
    for repository in dict.fromkeys(row.repository for row in rows):
        own = [row for row in rows if row.repository == repository]
        commit = (commits or {}).get(repository)
        tables.append(_table(f"{repository} at {commit}" if commit else repository, own))
    without = ", ".join(f"{count} {reason}" for reason, count in left.items() if count)
    return PAGE.format(
        path=path,
        summary=summary(rows),
        left=f"Files left out: {without}." if without else "",
        tables="\n".join(tables),
        machine=f"Made on {made['cpu']}, jax {made['jax']}.",
    )


def _table(title: str, rows: Sequence[Row]) -> str:
    lines = [f"## {title}", "", summary(rows), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    good = [row for row in rows if not row.error]
    groups: dict[str, list[Row]] = {}
    for row in good:
        one = row.operators == 1 and not row.part
        folder = row.path.rsplit("/", 1)[0]
        groups.setdefault(f"{folder} {next(iter(row.kinds))} {row.dtype}" if one else row.path, []).append(row)
    for members in groups.values():
        first = members[0]
        several = f"{len(members)} files of one {next(iter(first.kinds))}"
        head = [several if len(members) > 1 else _name(first) + (" (part)" if first.part else ""), first.dtype]
        head += [f"{sum(row.operators for row in members):,}", f"{sum(row.nodes for row in members):,}"]
        counts = [[row.counts[name] for row in members] for name in TARGETS]
        counts += [[row.c for row in members], [row.onnx for row in members]]
        lines.append("| " + " | ".join([*head, *(_cell(_added(each)) for each in counts)]) + " |")
    reasons = [f"| {_name(row)} | not read | {_plain(row.error)} |" for row in rows if row.error]
    reasons += [f"| {_name(row)} | part | {', '.join(f'`{name}`' for name in row.part)} |" for row in good if row.part]
    missing: dict[str, list[str]] = {}
    for row in good:
        for name, count in (*row.counts.items(), ("C", row.c), ("ONNX", row.onnx)):
            if not count.compared:
                missing.setdefault(f"{name} | {_plain(count.error)}", []).append(_name(row))
    reasons += [f"| {_listed(names)} | {why} |" for why, names in missing.items()]
    if reasons:
        reasons = ["", "| file | what is missing | why |", "| --- | --- | --- |", *reasons]
    return "\n".join([*lines, *reasons, ""])


def _added(counts: Sequence[Count]) -> Count:
    return Count(sum(count.compared for count in counts), sum(count.differ for count in counts))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} others"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")
