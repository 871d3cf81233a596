"""The house keeps its rules: no foreign private attributes, and no names of operations outside of `qjax/ops`."""

import ast
import functools
import json
import tomllib
from pathlib import Path

from qjax import ops

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(file for folder in ("qjax", "conformance") for file in (ROOT / folder).rglob("*.py"))
LANGUAGE = {"_asdict", "_fields", "_replace", "_getframe"}
"""Names with an underscore that Python itself documents."""
FOREIGN = {"torch_worker.py": {"_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor"}}
"""File -> names that another library has no public form of."""


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def private_reads(module: ast.Module) -> list[tuple[int, str]]:
    """(line, expression) of every `x._name` that this file does not define and that is no attribute of self."""
    own: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    found: list[tuple[int, str]] = []
    for node in ast.walk(module):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        base = node.value.func if isinstance(node.value, ast.Call) else node.value
        if node.attr in own | LANGUAGE or (isinstance(base, ast.Name) and base.id in ("self", "cls", "super")):
            continue
        found.append((node.lineno, ast.unparse(node)))
    return found


def test_a_private_attribute_is_read_in_its_own_file_only():
    """`training` and `analysis` use what users can: `qmodel.trace`, `SwitchedModel`, `codes_of`, `set_codes`."""
    found: list[str] = []
    for file in FILES:
        allowed = FOREIGN.get(file.name, set())
        reads = [(line, text) for line, text in private_reads(tree(file)) if text.rpartition(".")[2] not in allowed]
        found += [f"{file.relative_to(ROOT)}:{line}: {text}" for line, text in reads]
    assert found == []


def test_the_search_for_private_attributes_finds_them():
    module = ast.parse("qmodel._read(x)\nself._own(x)\nrow._asdict()\n_other = 1\nthing._other")
    assert private_reads(module) == [(1, "qmodel._read")]


# ---------------------------------------------------------------------------- names of operations

OTHERS = ("ops", "numerics", "targets", "conformance")
"""Folders whose `op` is something else: the operations of a target, a case of the matrix."""


def named_operations(module: ast.Module) -> list[tuple[int, str]]:
    """(line, expression) of every comparison of an operation with its name, and of every node made under a literal.

    Names that stand in a tuple, a list or a set of the module count as well.
    """
    names, found = set(ops.names()), list[tuple[int, str]]()
    held = {
        target.id
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Tuple, ast.List, ast.Set))
        for target in node.targets
        if isinstance(target, ast.Name) and names & {getattr(part, "value", None) for part in node.value.elts}
    }

    def literals(node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.Constant) and part.value in names) or (isinstance(part, ast.Name) and part.id in held)
            for part in ast.walk(node)
        )

    def asks(node: ast.AST) -> bool:
        return ast.unparse(node).endswith((".op", "op.name")) or ast.unparse(node) == "op"

    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = any(map(asks, sides)) and any(map(literals, sides))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Node", "accumulator"):
            named = any(isinstance(argument, ast.Constant) and argument.value in names for argument in node.args)
        else:
            continue
        if named:
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_operations_are_asked_for_facts_and_not_for_their_names():
    """The annotator, the lowering, the passes, `assign`, the emitters and the readers; see `qjax/ops/facts.py`."""
    found: list[str] = []
    for file in FILES:
        if set(file.relative_to(ROOT).parts[:2]) & set(OTHERS):
            continue
        names = named_operations(tree(file))
        found += [f"{file.relative_to(ROOT)}:{line}: {text}" for line, text in names]
    assert found == []


def test_the_search_for_names_finds_them():
    text = "node.op == 'cast'\nop.name in ('dot', 'conv')\neqn.primitive == 'cast'\nNode(n, 'fill', ())\nnode.op == 'x'"
    text += "\nHELD = ('cast', 'dot')\nnode.op in HELD\nnode.op in FREE"
    assert [line for line, _ in named_operations(ast.parse(text))] == [1, 2, 4, 7]


# ---------------------------------------------------------------------------- imports


def test_no_module_imports_a_sibling_by_its_name_to_hide_a_circle():
    """By name are imported: what is loaded when it is asked for (names of the package, formats, handlers), and what
    may not be installed."""
    lazy = {"qjax/__init__.py", "qjax/cli/__init__.py", "qjax/runtimes/__init__.py", "qjax/export/emit/__init__.py"}
    lazy |= {"qjax/contrib/importers/__init__.py", "qjax/export/emit/onnx/__init__.py"}
    found: list[str] = []
    for file in FILES:
        where = file.relative_to(ROOT).as_posix()
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
                text = ast.unparse(node.args[0])
                if text.startswith("'qjax.") and where not in lazy | {"qjax/runtimes/c.py"}:
                    found.append(f"{where}:{node.lineno}: {text}")
    assert found == []


def test_every_folder_is_checked_by_one_of_the_two_type_checks():
    basic = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["exclude"])
    lines = (ROOT / "tools" / "pyright-strict.json").read_text().splitlines()
    strict = json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))
    assert {folder.removeprefix("../") for folder in strict["include"]} == basic - {"**/__pycache__", ".venv*"}


def test_no_test_sets_the_environment_where_pytest_imports_it():
    """Doctests are looked for in every file, and what one sets lasts for all tests of a process and what they start."""
    found: list[str] = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if "os.environ" not in file.read_text(encoding="utf-8"):
            continue  # parsing all takes seconds
        for node in tree(file).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(ast.unparse(target).startswith("os.environ") for target in targets):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []
