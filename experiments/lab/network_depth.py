"""Drift along real networks: what a target changes in each node alone, and in the whole network."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.network_drift import EXAMPLES, FULL, QUICK, alone, end_to_end, prepared
from experiments.lab.network_theory import Carried, carried, decisions, two_roundings
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table
from qjax.graph.ir import Node

TARGETS = ("double_round", "tflite_micro", "nvdla", "torch_fbgemm", "onnxruntime")
"""Two roundings; the same with TFLite's sums; fewer bits of scales; float32 products with float32 biases or without."""
WIDE = 0.25
"""Of a share, what the theory may be wrong by before the pooling."""

Claim = tuple[Prediction, Callable[[], float]]


def networks(settings: Settings) -> tuple[str, ...]:
    return FULL if settings.full else QUICK


@functools.lru_cache(maxsize=32)
def _expected(name: str, seed: int, target: str) -> Carried:
    known = prepared(name, seed)
    return carried(known.ir, known.reference, alone(name, seed, target))


def _share(name: str, seed: int, target: str, tensor: str) -> float:
    return end_to_end(name, seed, target).shares[tensor]


def _output(name: str, seed: int) -> str:
    return prepared(name, seed).ir.outputs[0]


def _products(name: str, seed: int) -> list[Node]:
    return [node for node in prepared(name, seed).ir.nodes if "kernel" in node.constants]


def _before_pooling(name: str, seed: int) -> str:
    """The last tensor with places: what the average over them, or the head, reads."""
    ir = prepared(name, seed).ir
    return [node.output for node in ir.nodes if len(ir.tensors[node.output].shape) == 4][-1]


def claims(settings: Settings) -> Iterator[Claim]:
    for name in networks(settings):
        yield _arising(name, settings.seed)
        for target in TARGETS:
            yield _maps(name, settings.seed, target)
            yield _outputs(name, settings.seed, target)
        yield _decisions(name, settings.seed)
        yield (
            Prediction(f"{name}: bias of the outputs under double_round, steps", -0.1, 0.1, "ties have no sign"),
            lambda name=name: float(np.mean(_last(name, settings.seed, "double_round"))),
        )


def _last(name: str, seed: int, target: str) -> np.ndarray:
    return end_to_end(name, seed, target).last


def _changed(name: str, seed: int, target: str) -> int:
    """Examples whose decision, the greatest of the output codes, changes."""
    codes = prepared(name, seed).reference[_output(name, seed)]
    return int(np.sum((codes + _last(name, seed, target)).argmax(-1) != codes.argmax(-1)))


def _per_node(name: str, seed: int, target: str) -> float:
    """The share of codes that differ on the reference's inputs, mean over nodes."""
    return float(np.mean([np.mean(d != 0) for d in alone(name, seed, target).values()]))


def _arising(name: str, seed: int) -> Claim:
    known, products = prepared(name, seed), _products(name, seed)
    expected = np.mean([two_roundings(known.ir, node, known.reference) for node in products])
    why = (
        "the mean of 2^-(r+1) over the right shifts r in use, where the ReLU is active; 40%, as sums of few "
        "products, and those of a constant background, are not distributed evenly"
    )

    def measured() -> float:
        found = alone(name, seed, "double_round")
        return float(np.mean([np.mean(found[node.output] != 0) for node in products]))

    title = f"{name}: share of codes in which double_round differs on the same inputs, mean over products"
    return Prediction(title, 0.6 * float(expected), 1.4 * float(expected), why), measured


def _sampling(name: str, seed: int, target: str) -> float:
    """Five relative standard errors of the number of codes in which any difference arises."""
    origins = sum(np.count_nonzero(d) for d in alone(name, seed, target).values())
    return 5 / max(1, origins) ** 0.5


def _maps(name: str, seed: int, target: str) -> Claim:
    tensor = _before_pooling(name, seed)
    expected, width = _expected(name, seed, target).shares[tensor], WIDE + _sampling(name, seed, target)
    why = f"independent differences, {WIDE:.0%}, and 5 standard errors of the number of codes in which any arise"
    title = f"{name}: share under {target} in the last maps"
    return (
        Prediction(title, max(0.0, expected * (1 - width)), min(1.0, expected * (1 + width)), why),
        lambda: _share(name, seed, target, tensor),
    )


def _outputs(name: str, seed: int, target: str) -> Claim:
    expected, width = _expected(name, seed, target).shares[_output(name, seed)], 0.2 + _sampling(name, seed, target)
    why = (
        "at least what independent differences give, because those of neighbouring positions have a common origin "
        "and add up; at most three times that; 20% for the rest, and 5 standard errors of the number of codes in "
        "which any arise"
    )
    title = f"{name}: share under {target} in the outputs"
    return (
        Prediction(title, max(0.0, expected * (1 - width)), min(1.0, 3 * expected * (1 + width)), why),
        lambda: _share(name, seed, target, _output(name, seed)),
    )


def _decisions(name: str, seed: int) -> Claim:
    output = _output(name, seed)
    codes = prepared(name, seed).reference[output]
    expected = decisions(codes, _expected(name, seed, "double_round").last, np.random.default_rng(seed))
    high = 3 * expected + 5 * (expected / len(codes)) ** 0.5 + 1 / len(codes)

    def measured() -> float:
        return _changed(name, seed, "double_round") / len(codes)

    why = "margins of the reference's outputs against the differences; three times that, and 5 standard errors"
    return Prediction(f"{name}: share of decisions that change under double_round", 0.0, high, why), measured


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    tables = [_table(name, settings.seed) for name in networks(settings)]
    return Measurement(values, tables, _data(settings), _conclusion(settings))


def _table(name: str, seed: int) -> Table:
    columns = ["target", "arise per node", "last maps", "predicted", "outputs", "predicted", "decisions"]
    rows: list[list[Any]] = []
    maps, output = _before_pooling(name, seed), _output(name, seed)
    for target in TARGETS:
        expected = _expected(name, seed, target)
        rows.append(
            [
                target,
                _per_node(name, seed, target),
                _share(name, seed, target, maps),
                expected.shares[maps],
                _share(name, seed, target, output),
                expected.shares[output],
                f"{_changed(name, seed, target)} of {EXAMPLES[name]}",
            ]
        )
    return Table(f"{name}: share of codes that differ from nearest_even", columns, rows)


def _data(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in networks(settings):
        nodes = [node.output for node in prepared(name, settings.seed).ir.nodes]
        found[name] = {
            target: {
                "alone": [float(np.mean(alone(name, settings.seed, target)[key] != 0)) for key in nodes],
                "measured": [_share(name, settings.seed, target, key) for key in nodes],
                "predicted": [_expected(name, settings.seed, target).shares[key] for key in nodes],
            }
            for target in TARGETS
        }
    return found


def _conclusion(settings: Settings) -> str:
    lines: list[str] = []
    for name in networks(settings):
        seed, maps, output = settings.seed, _before_pooling(name, settings.seed), _output(name, settings.seed)
        rare, often = (_per_node(name, seed, target) for target in ("onnxruntime", "double_round"))
        changed = _changed(name, seed, "double_round")
        lines.append(
            f"- {name}: double_round changes {often:.2%} of the codes of a single node and "
            f"{_share(name, seed, 'double_round', maps):.0%} of those in the last feature maps. It changes "
            f"{_share(name, seed, 'double_round', output):.0%} of the outputs, and {changed} of {EXAMPLES[name]} "
            f"decisions. Under onnxruntime {rare:.5%} of a node's codes differ, and "
            f"{_share(name, seed, 'onnxruntime', output):.1%} of the outputs."
        )
    return (
        "\n".join(lines) + "\n\n"
        "The share in the feature maps can be predicted from the weights and from how often each "
        "node differs on its own. It grows until inactive ReLUs remove as many differences as "
        "other nodes spread, and a deep network reaches that balance even from the rarest "
        "difference.\n\n"
        "After global average pooling, more codes differ than if the differences were "
        "independent. Those of neighbouring positions have a common origin, so they do not "
        "cancel."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for panel, (name, drifts) in zip(panels, data.items(), strict=True):
        for colour, target in zip(("#3b6ea5", "#d08a2e"), ("double_round", "nvdla"), strict=True):
            shares, nodes = drifts[target], np.arange(1, len(drifts[target]["measured"]) + 1)
            panel.semilogy(nodes, _seen(shares["measured"]), color=colour, label=target)
            panel.semilogy(nodes, _seen(shares["predicted"]), color=colour, linestyle=":")
            panel.semilogy(nodes, _seen(shares["alone"]), color=colour, linestyle="", marker=".", markersize=4)
        panel.set(xlabel="node", title=name)
    panels[0].set(ylabel="share of codes that differ")
    panels[0].legend(fontsize=8, loc="upper left")
    figure.supxlabel("dotted: predicted; points: each node alone", fontsize=9)


def _seen(shares: list[float]) -> np.ndarray:
    """A logarithmic axis has no place for 0."""
    return np.where(np.array(shares) > 0, shares, np.nan)


STUDY = Study(
    name="network_depth",
    title="Drift along real networks",
    question=(
        "Suppose two runtimes differ in one code in a thousand in each node. How many outputs and decisions of a "
        "real network then differ, and can that be predicted?"
    ),
    method=(
        "The networks are calibrated with 8-bit weights and activations: a ResNet and a depthwise network on "
        "Fashion-MNIST, and EfficientNet-Lite0 with its public weights (`make weights`). Without `--full` it is a "
        "CNN on digits. Each is converted for `nearest_even` and retargeted.\n\n"
        "Each node of a target first runs alone, on the reference's codes, and a mean-field theory propagates the "
        "differences found there through the weights. The theory knows which ReLUs are active in the reference, and "
        "assumes that the differences that meet in a sum are independent. Then the whole network runs under the "
        "target, from the same input codes."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "A third to a half of the output codes may differ between two runtimes whose single layers differ in one "
        "code in a thousand. In a deep network (EfficientNet-Lite0) one code in a million is enough for that. Judge "
        "by decisions, because few of them change at 8 bits, and if exact codes matter, convert for the runtime "
        "that you ship to."
    ),
    command="python -m experiments network_depth",
)
