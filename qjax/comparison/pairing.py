"""Checks that two graphs are two conversions of one model, and pairs their nodes."""

from qjax.graph.ir import Graph, Node, Tensor


def check_signature(left: Graph, right: Graph) -> None:
    """Raise a ValueError unless both graphs have the same inputs and outputs."""
    if left.inputs != right.inputs or len(left.outputs) != len(right.outputs):
        raise ValueError(
            f"compare: the graphs come from different models: inputs {', '.join(left.inputs)} and {len(left.outputs)} "
            f"outputs against inputs {', '.join(right.inputs)} and {len(right.outputs)} outputs. Convert one model "
            "under two targets: qjax.convert(qmodel, sample, target=...)."
        )
    problems = [text for name in left.inputs for text in _problems(left.tensors[name], right.tensors[name])]
    for mine, theirs in zip(left.outputs, right.outputs, strict=True):
        problems += _problems(left.tensors[mine], right.tensors[theirs])
    _raise_for(problems)


def pairs(a: Graph, b: Graph) -> dict[str, tuple[Node, Node]]:
    """The nodes in both graphs by name, in a's order; a ValueError unless the two of each pair have one form."""
    others = {node.name: node for node in b.nodes}
    paired = {node.name: (node, others[node.name]) for node in a.nodes if node.name in others}
    if a.nodes and not paired:
        raise ValueError(
            "compare: expected two graphs of one model, got graphs without a common node: "
            f"a has {_first(a)}, ...; b has {_first(b)}, ..."
        )
    problems: list[str] = []
    for name, (mine, theirs) in paired.items():
        if mine.op != theirs.op or len(mine.inputs) != len(theirs.inputs):
            what = [f"{node.op} of {len(node.inputs)} tensors" for node in (mine, theirs)]
            problems.append(f"node {name!r} is {what[0]} in a, {what[1]} in b")
            continue
        tensors = zip((*mine.inputs, mine.output), (*theirs.inputs, theirs.output), strict=True)
        for left, right in tensors:
            problems += _problems(a.tensors[left], b.tensors[right])
    _raise_for(problems)
    return paired


def _first(graph: Graph) -> str:
    return ", ".join(node.name for node in graph.nodes[:4])


def _problems(a: Tensor, b: Tensor) -> list[str]:
    if (a.shape, a.dtype) == (b.shape, b.dtype):
        return []
    return [f"{a.name!r} is {a.dtype} {_shape(a)} in a, {b.dtype} {_shape(b)} in b"]


def _shape(tensor: Tensor) -> str:
    return "x".join("batch" if n is None else str(n) for n in tensor.shape)


def _raise_for(problems: list[str]) -> None:
    unique = list(dict.fromkeys(problems))
    if unique:
        more = f", and {len(unique) - 4} more" if len(unique) > 4 else ""
        raise ValueError(
            "compare: expected two graphs of one model, with the same shapes and types of codes; "
            f"{'; '.join(unique[:4])}{more}. Convert one quantized model under two targets: "
            "qjax.convert(qmodel, sample, target=...)."
        )
