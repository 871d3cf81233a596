"""Ties in the pools and additions of real networks: how many there are, and what each target's rule changes."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.learned_networks import paired
from experiments.lab.pooled_networks import POWERS, RULES, SMALL, Tally, counted, looked, mixed, names, prepared
from experiments.lab.pooling_cases import chosen_targets, ties_of
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

TARGETS = tuple(sorted({name for op in RULES.values() for name in chosen_targets(op, False)} - {"nearest_even"}))
"""One for each formula of additions and of pools."""
FACTOR = 2.0**-14
"""By how much a runtime's factors may be off, as a part of the greater one: OpenVINO's have 14 bits, others more."""
RARE = 1e-4
"""A smaller share of ties is none."""
FLOATS = ("onnxruntime",)
"""Whose pools dequantize to float32 before they add, so that a real-valued scale's last bits break ties."""

Claim = tuple[Prediction, Callable[[], float]]


def _treated(name: str, settings: Settings) -> Mapping[str, Tally]:
    return counted(name, settings, TARGETS)


@functools.lru_cache(maxsize=4)
def changes(name: str, settings: Settings) -> Mapping[str, tuple[int, float, float]]:
    """Target -> images whose class changes; points less those of the reference, and McNemar's standard error."""
    known = prepared(name, settings)
    right = known.classes == known.data.test_labels
    return {
        target: (int(np.sum(classes != known.classes)), *paired(classes == known.data.test_labels, right))
        for target, classes in mixed(name, settings, TARGETS).items()
    }


def of_kind(tallies: Mapping[str, Tally], kind: str) -> list[Tally]:
    return [tally for tally in tallies.values() if tally.kind == kind]


def groups(tallies: Mapping[str, Tally]) -> list[str]:
    """The kinds with a rule that a network has."""
    return [kind for kind in RULES if of_kind(tallies, kind)]


def part(tallies: list[Tally], rule: str, index: int) -> float:
    """The mean difference from half-even in steps (index 0), or the share of codes that differ (1), counted ties."""
    return sum(tally.rules[rule][index] for tally in tallies) / sum(tally.count for tally in tallies)


def of_target(tallies: list[Tally], target: str, index: int) -> float:
    """The same as the target has it; 2: the share of codes that are not those of its rule."""
    return sum(tally.targets[target][index] for tally in tallies) / sum(tally.count for tally in tallies)


def simple(name: str, kind: str) -> bool:
    """Whether the ratios of scales are powers of two."""
    return kind == "pools" or name.endswith(POWERS)


def quiet(name: str, kind: str) -> list[str]:
    """Targets whose arithmetic is exact there, so that only ties can differ."""
    return [t for t in TARGETS if name.endswith(POWERS) or kind == "additions" or t not in FLOATS]


def claims(settings: Settings) -> Iterator[Claim]:
    for name in names(settings):
        for node, tally in counted(name, settings).items():
            yield _ties(name, node, tally, settings)
        for kind in groups(counted(name, settings)):
            if simple(name, kind):
                yield from _rules(name, kind, settings)
            else:
                yield _near(name, kind, settings)
        yield from _classes(name, settings)


def _ties(name: str, node: str, tally: Tally, settings: Settings) -> Claim:
    share = tally.expected / tally.count
    low, high = (0.95 * share, 1.05 * share) if share > RARE else (0.0, RARE)
    why = "residues of single codes, if they were independent; which codes are 0 is counted; 5% for what depends"
    if share <= RARE:
        why = "a tie needs a multiple of an odd number of some 24 bits, or of 49; or sums are whole steps"
    return (
        Prediction(f"{name}, {node}: share of ties", low, high, why),
        lambda: counted(name, settings)[node].ties / counted(name, settings)[node].count,
    )


def _rules(name: str, kind: str, settings: Settings) -> Iterator[Claim]:
    """Predicted from counted ties; of all targets with a rule the farthest is measured."""
    before = of_kind(counted(name, settings), kind)
    targets = quiet(name, kind)
    for rule in dict.fromkeys(ties_of(RULES[kind], target) for target in targets):
        bias = part(before, rule, 0)

        def measured(rule: str = rule, bias: float = bias) -> float:
            mine = [target for target in targets if ties_of(RULES[kind], target) == rule]
            found = [of_target(of_kind(_treated(name, settings), kind), target, 0) for target in mine]
            return max(found, key=lambda value: abs(value - bias))

        why = "ties counted in integers, each moved as the rule says; exact, for every such target"
        yield Prediction(f"{name}, {kind}, ties {rule}: bias against half-even, steps", bias, bias, why), measured

    def off() -> float:
        return max(of_target(of_kind(_treated(name, settings), kind), target, 2) for target in targets)

    title = f"{name}, {kind}: share of codes that are not those of the target's rule, greatest"
    yield Prediction(title, 0, 0, "such ratios leave float32 and multipliers exact"), off
    if any(tally.ties for tally in before):

        def half() -> float:
            return part(before, "up", 0) * sum(t.count for t in before) / sum(t.ties for t in before)

        title = f"{name}, {kind}: bias of ties up as a part of the share of ties"
        yield Prediction(title, 0.45, 0.55, "half of the ties lie above an even code; 10%"), half


def _near(name: str, kind: str, settings: Settings) -> Claim:
    def measured() -> float:
        return max(of_target(of_kind(_treated(name, settings), kind), target, 1) for target in TARGETS)

    tallies = of_kind(counted(name, settings), kind)
    count = sum(tally.count for tally in tallies)
    share = FACTOR * sum(tally.reach for tally in tallies) / count
    why = (
        "no ties; factors of 14 bits or more are off by up to 2^-14 of the greater one, times the operands; 5 standard "
    )
    title = f"{name}, {kind} with real-valued scales: share of codes that are not half-even, greatest"
    return Prediction(title, 0, share + 5 * (share / count) ** 0.5, why + "errors"), measured


def _classes(name: str, settings: Settings) -> Iterator[Claim]:
    known = prepared(name, settings)
    images, moved = len(known.classes), max(known.moved, 5)
    why = (
        f"rounding to 8 bits changes {known.moved}, and rounds every tensor; a tie changes only a few codes, by one "
        "step"
    )
    yield (
        Prediction(f"{name}: images whose class a target's pools and additions change, greatest", 0, moved, why),
        lambda: float(max(count for count, *_ in changes(name, settings).values())),
    )
    width = 5 * 100 * moved**0.5 / images
    yield (
        Prediction(
            f"{name}: points that they change, farthest from 0",
            -width,
            width,
            "no effect: 5 standard errors (McNemar) if as many images change",
        ),
        lambda: max((points for _, points, _ in changes(name, settings).values()), key=abs),
    )


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    tables = [_ties_table(settings), *(_targets_table(name, settings) for name in names(settings))]
    return Measurement(values, tables, _data(settings), _conclusion(settings))


def _ties_table(settings: Settings) -> Table:
    rows = [
        [name, node, tally.kind, *(f"{n / tally.count:.3%}" for n in (tally.ties, tally.expected, tally.alike))]
        for name in names(settings)
        for node, tally in counted(name, settings).items()
    ]
    title = f"Ties in {looked(settings):,} test images"
    return Table(title, ("network", "node", "kind", "ties", "if independent", "if all residues were alike"), rows)


def _targets_table(name: str, settings: Settings) -> Table:
    tallies = _treated(name, settings)
    kinds = list(dict.fromkeys(tally.kind for tally in tallies.values()))
    rows: list[list[Any]] = []
    for target in TARGETS:
        count, points, error = changes(name, settings)[target]
        row: list[Any] = [target]
        for kind in kinds:
            mine = of_kind(tallies, kind)
            row += [ties_of(RULES[kind], target) if kind in RULES else "", f"{of_target(mine, target, 0):+.5f}"]
            row.append(f"{of_target(mine, target, 1):.4%}")
        rows.append([*row, count, f"{points:+.2f} ± {error:.2f}"])
    columns = ["target"]
    for kind in kinds:
        columns += [f"{kind}: ties", "bias, steps", "not half-even"]
    known = prepared(name, settings)
    title = f"{name}: targets against half-even (8 bits change the class of {known.moved} of {len(known.classes):,})"
    return Table(title, [*columns, "classes changed", "points"], rows)


def _data(settings: Settings) -> dict[str, Any]:
    return {
        name: {
            "ties": {node: tally.ties / tally.count for node, tally in counted(name, settings).items()},
            "changed": {target: count for target, (count, *_) in changes(name, settings).items()},
            "moved": prepared(name, settings).moved,
        }
        for name in names(settings)
    }


def _conclusion(settings: Settings) -> str:
    lines: list[str] = []
    for name in names(settings):
        tallies, known = _treated(name, settings), prepared(name, settings)
        for kind in groups(tallies):
            mine = of_kind(tallies, kind)
            share = sum(tally.ties for tally in mine) / sum(tally.count for tally in mine)
            biases = {target: of_target(mine, target, 0) for target in TARGETS}
            far = max(biases, key=lambda target: abs(biases[target]))
            lines.append(
                f"- {name}, {kind}: {share:.2%} of the results are ties. The greatest bias against half-even is "
                f"{biases[far]:+.4f} steps ({far})."
            )
        found = changes(name, settings)
        far = max(found, key=lambda target: found[target][0])
        count, points, error = found[far]
        lines.append(
            f"- {name}: {far} changes the most classes, those of {count} of {len(known.classes):,} images. Accuracy "
            f"changes by {points:+.2f} points (standard error {error:.2f}). For comparison, rounding to 8 bits "
            f"changes {known.moved} classes."
        )
    return "\n".join(lines)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    nodes = max((list(one["ties"]) for one in data.values()), key=len)
    for index, (name, one) in enumerate(data.items()):
        places = [nodes.index(node) for node in one["ties"]]
        left.plot([100 * share for share in one["ties"].values()], places, "o", color=f"C{index}", label=name)
        place = np.arange(len(one["changed"])) + 0.25 * (index - 1)
        right.barh(place, list(one["changed"].values()), 0.22, color=f"C{index}", label=name)
        right.axvline(one["moved"], color=f"C{index}", linestyle=":")
    left.set(xlabel="ties, %", title="Nodes, in their order", yticks=range(len(nodes)), yticklabels=nodes)
    left.invert_yaxis()
    left.legend(fontsize=8)
    targets = list(next(iter(data.values()))["changed"])
    right.set_yticks(range(len(targets)), targets, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="classes that change (dotted: float to 8 bits)", title="Pools and additions of a target")


STUDY = Study(
    name="network_pooling",
    title="Ties in the pools and additions of real networks",
    question=(
        "Averages over 2x2 and sums with equal scales are often ties, and runtimes round ties differently. How many "
        "ties does a trained network have, and do they change its predicted classes?"
    ),
    method=(
        "Networks are trained in float and calibrated with 1,024 images: 8 bits, weights per channel. With `--full` "
        'one is a ResNet on Fashion-MNIST, and one is the same with scales that are powers of two (`method="tqt"`). '
        f"A third has 2x2 average pools in place of strides, half the channels, and {SMALL:,} training images. "
        "Otherwise they see digits. The output of a pool has the quantization parameters of its input, as in TFLite. "
        "Ties are counted in exact integers, because float32 scales are fractions. A tie counts only if it decides a "
        "code that the ReLU does not clip.\n\n"
        "One target represents each formula and computes additions, pools and the mean over the map; the rest is "
        "computed as under `nearest_even`. Biases are relative to the exact half-even codes. The predictions use the "
        "counted ties and the rule of each target, before any graph of that target is made. Classes are those of all "
        "test images."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Expect runtimes to disagree in about a tenth of the codes of 2x2 average pools, and of additions if your "
        "scales are powers of two. Additions with real-valued scales are safer: they have no ties, and runtimes "
        "differ there in fewer than 1 code in 1,000. Convert for the right target if classes must be equal, because "
        "ties change up to 1 class in 100, though not the accuracy."
    ),
    command="python -m experiments network_pooling",
)
