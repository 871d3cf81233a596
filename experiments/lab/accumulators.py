"""How narrow may an accumulator be? Overflow by chance, overflow on data, and weights that cannot overflow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import qjax
from experiments.data import digits
from experiments.lab import accumulators_pairs as pairs
from experiments.lab import accumulators_training as training
from experiments.lab import accumulators_widths as widths
from experiments.lab.accumulators_conclusion import conclusion
from experiments.lab.accumulators_picture import draw
from experiments.training import accuracy, scores
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, binomial_band

SIGMAS = (20, 24, 28, 32, 40, 48, 64, 96)
"""Standard deviations of int8 weights."""

WIDTHS = {8: (22, 21, 20, 19, 18, 17, 16, 14, 12, 10, 8), 4: (13, 12, 11, 10, 9, 8, 7, 6)}
"""Bits of codes -> widths of registers."""

PAPER = {16: (94.2, 94.2), 14: (92.6, 94.1), 12: (83.9, 90.6)}
"""CIFAR-10, ResNet-18, W4A4, 95.0 in float: A2Q and A2Q+ (Colbert et al. 2024, arXiv 2401.10432)."""

LOG2_FAN_IN = 6
"""What a fan-in of 64 has less than ResNet-18's 512 * 9 = 4608, in bits."""


def samples(settings: Settings) -> int:
    """How many pairs are drawn for each distribution."""
    return 2**25 if settings.full else 2**22


def seeds(settings: Settings) -> range:
    """Those of the constrained trainings."""
    return range(settings.seed, settings.seed + (5 if settings.full else 2))


def predict(settings: Settings) -> Sequence[Prediction]:
    found: list[Prediction] = []
    n = samples(settings)
    for name, weights in (("uniform weights", pairs.uniform_weights()), ("sigma 32", pairs.normal_weights(32))):
        share = pairs.saturating_share(weights, 256)
        why = f"{share:.4g} by adding up all pairs of products exactly; 5 sigma of {n:,} independent pairs"
        found.append(Prediction(f"pairs clamped, uint8 codes, {name}", *binomial_band(share, n), why))
    found += [
        Prediction("pairs clamped, 7-bit codes", 0, 0, "2 * 127 * 128 = 32512 < 2^15: none can"),
        Prediction("pairs clamped in the network, 7-bit codes", 0, 0, "the same"),
        Prediction(
            "accuracy lost to clamped pairs, W8A8",
            -0.01,
            0.01,
            "a pair loses at most 32,003 of sums of some 2^18, and few lose anything: no more than five images of 500",
        ),
        Prediction(
            "codes changed by registers of the worst case and wider",
            0,
            0,
            "the worst case is a proof: wrapping and saturating, both networks, every output",
        ),
        Prediction(
            "W8A8: bits between the worst case and the narrowest harmless wrapping register",
            0,
            3,
            "harmless: at most a point of accuracy. K = 64 normal weights of deviation s and codes up to X: worst case "
            "0.4 K s X = 26 s X, some 30 s X in the worst channel; on data a deviation of sqrt(K) 0.47 s X = 4 s X, "
            "and a point is lost where sums of 3 deviations leave: log2(30 / 12) = 1.3 bits; training may move it "
            "by a bit and rounding up to whole bits by another",
        ),
        Prediction(
            "W8A8: bits by which saturating may be narrower than wrapping",
            0,
            3,
            "a sum just beyond the register keeps its sign and nearly its value when it saturates and changes sign "
            "when it wraps; a clamped register is off by factors once it is 2 to 3 bits too narrow",
        ),
        Prediction(
            "W8A8: greatest advantage of saturating over wrapping, accuracy",
            0.3,
            0.9,
            "there is a width at which wrapping is near chance (0.1) and saturating still ranks the classes; 0.9 is "
            "all there is",
        ),
        Prediction(
            "W8A8: accuracy with 8 bits that wrap",
            *binomial_band(0.1, 500),
            "sums of some 2^18 modulo 2^8 are as good as random: chance, 5 sigma of 500 images",
        ),
    ]
    return [*found, *_predict_training()]


def _predict_training() -> list[Prediction]:
    return [
        Prediction("A2Q+: worst-case bits above those asked for, greatest", 0, 0, "the bound holds, and is reached"),
        Prediction(
            "A2Q: worst-case bits above those asked for, greatest",
            -1,
            0,
            "the bound holds; it pays for all codes of one sign, and with codes never negative half of them "
            "are not, so a bit may be left over",
        ),
        Prediction("codes changed by a wrapping register of the bits trained for", 0, 0, "no input overflows"),
        Prediction(
            "W4A4 trained freely, accuracy less that in float",
            -0.02,
            0.015,
            "-0.2 points with a deviation of 0.7 over five seeds of the same network, three deviations",
        ),
        Prediction(
            "12 bits, A2Q+ less trained freely",
            -0.015,
            0.015,
            "the free network's worst case is about 0.4 * 64 * 3 * 15 = 1150, which 12 bits hold: nothing to do; "
            "two deviations of a difference of two trainings",
        ),
        Prediction(
            "A2Q+ less A2Q at 10 bits",
            -0.01,
            0.02,
            "the papers' 16 bits (both 94.2), which a fan-in of 64 instead of 4608 makes 10; one deviation of noise",
        ),
        Prediction(
            "A2Q+ less A2Q at 8 bits",
            0.01,
            0.15,
            "the papers' 14 bits give +1.5 points, which is the low end here: they leave a norm of 511 (A2Q) for some "
            "4608 weights, 8 bits leave 7 for 64: the same share, but too few to sum many inputs; A2Q+ has 16. It is "
            "one bit of A2Q+ at most, which is worth points here and not tens of points",
        ),
        Prediction(
            "A2Q+ less A2Q at 6 bits",
            0.1,
            0.8,
            "the papers' 12 bits: +6.7 points; here A2Q leaves one code of 1 per channel, so that every class score "
            "sees a single pixel, and A2Q+ two of either sign, so that it sees up to 4^3 = 64",
        ),
        Prediction(
            "A2Q at 6 bits, accuracy",
            binomial_band(0.1, 500)[0],
            0.6,
            "ten single pixels of 16 levels, ranked by monotone functions: chance (less 5 sigma of 500 images) or "
            "better, and far from a classifier",
        ),
        Prediction(
            "A2Q+ at P - 1 bits less A2Q at P bits, mean over P = 10, 9, 8",
            -0.02,
            0.04,
            "norms of 34, 16 and 8 against 31, 15 and 7: A2Q+ is worth one bit. Noise of a training, and the one to "
            "three codes more. P = 7 is left out: rounding down to whole codes makes it 4 against 3, a third more",
        ),
    ]


def measure(settings: Settings) -> Measurement:
    rng, n = np.random.default_rng(settings.seed), samples(settings)
    shares = {sigma: pairs.measured_share(rng, sigma, 256, n if sigma == 32 else n // 4) for sigma in SIGMAS}
    uniform, seven = (pairs.measured_share(rng, None, codes, n) for codes in (256, 128))
    data = digits()
    images, labels = data.test_images, data.test_labels
    network = training.float_network(data, settings.seed)
    float_accuracy = accuracy(scores(network, images), labels)

    eight, four = (training.quantized(network, bits, data) for bits in (8, 4))
    graphs = {bits: qjax.convert(q, images[:1]) for bits, q in ((8, eight), (4, four))}
    after = {bits: widths.under_widths(graph, images, labels, WIDTHS[bits]) for bits, graph in graphs.items()}
    clamped = {reduced: _pairs_of(network, reduced, data) for reduced in (False, True)}
    runs = list(training.runs(four, network, data, seeds(settings)))

    mean = _means(runs)
    free = mean["free", 32]
    gaps = {bits: mean["A2Q+", bits] - mean["A2Q", bits] for bits in training.NARROW}
    shifted = [mean["A2Q+", bits - 1] - mean["A2Q", bits] for bits in (10, 9, 8)]
    w8 = after[8]
    over = {m: max(run.worst - run.bits for run in runs if run.method == m) for m in training.METHODS}
    values = {
        "pairs clamped, uint8 codes, uniform weights": uniform,
        "pairs clamped, uint8 codes, sigma 32": shares[32],
        "pairs clamped, 7-bit codes": seven,
        "pairs clamped in the network, 7-bit codes": clamped[True][0],
        "accuracy lost to clamped pairs, W8A8": clamped[False][2] - clamped[False][1],
        "codes changed by registers of the worst case and wider": sum(w.differing for w in after.values()),
        "W8A8: bits between the worst case and the narrowest harmless wrapping register": (
            w8.worst - w8.narrowest("wrap")
        ),
        "W8A8: bits by which saturating may be narrower than wrapping": (
            w8.narrowest("wrap") - w8.narrowest("saturate")
        ),
        "W8A8: greatest advantage of saturating over wrapping, accuracy": max(
            b - a for a, b in zip(w8.accuracies["wrap"], w8.accuracies["saturate"], strict=True)
        ),
        "W8A8: accuracy with 8 bits that wrap": w8.accuracies["wrap"][w8.widths.index(8)],
        "A2Q+: worst-case bits above those asked for, greatest": over["A2Q+"],
        "A2Q: worst-case bits above those asked for, greatest": over["A2Q"],
        "codes changed by a wrapping register of the bits trained for": sum(run.differing or 0 for run in runs),
        "W4A4 trained freely, accuracy less that in float": free - float_accuracy,
        "12 bits, A2Q+ less trained freely": mean["A2Q+", 12] - free,
        **{f"A2Q+ less A2Q at {bits} bits": gaps[bits] for bits in (10, 8, 6)},
        "A2Q at 6 bits, accuracy": mean["A2Q", 6],
        "A2Q+ at P - 1 bits less A2Q at P bits, mean over P = 10, 9, 8": float(np.mean(shifted)),
    }
    drawn = {
        "sigmas": list(SIGMAS),
        "measured_pairs": [shares[sigma] for sigma in SIGMAS],
        "uniform": uniform,
        "float": float_accuracy,
        "free": free,
        "widths": {
            str(bits): {"worst": w.worst, "exact": w.exact, "widths": w.widths, **w.accuracies}
            for bits, w in after.items()
        },
        "trained": {m: [[bits, mean[m, bits]] for bits in training.NARROW] for m in training.METHODS},
        "before": {m: [[b, _first(runs, m, b)] for b in training.NARROW] for m in training.METHODS},
        "calibrated": mean[training.CALIBRATED, training.CALIBRATED_BITS],
        "clamped": {"share": clamped[False][0], "accuracy": clamped[False][1], "exact": clamped[False][2]},
    }
    return Measurement(values, _tables(runs, mean, gaps), drawn, conclusion(values, drawn, w8, runs))


def _pairs_of(network: Any, reduced: bool, data: Any) -> tuple[float, float, float]:
    """W8A8 with unsigned codes: the share of clamped pairs, the accuracy with them, and without."""
    recipe = qjax.Recipe(
        activations=qjax.QSpec(bits=8, signed=False, symmetric=False),
        weights=qjax.QSpec(bits=8, axis=-1),
        reduce_range=reduced,
    )
    qmodel = qjax.quantize(network, recipe, data.train_images[:512])
    graph = qjax.convert(qmodel, data.test_images[:1])
    exact = accuracy(graph.run(graph.quantize(data.test_images)), data.test_labels)
    return *widths.pairs(graph, data.test_images, data.test_labels), exact


def _means(runs: Sequence[training.Run]) -> dict[tuple[str, int], float]:
    keys = dict.fromkeys((run.method, run.bits) for run in runs)
    return {key: float(np.mean([run.accuracy for run in runs if (run.method, run.bits) == key])) for key in keys}


def _first(runs: Sequence[training.Run], method: str, bits: int) -> float:
    return next(run.projected for run in runs if (run.method, run.bits) == (method, bits))


def _tables(
    runs: Sequence[training.Run], mean: Mapping[tuple[str, int], float], gaps: Mapping[int, float]
) -> list[Table]:
    rows: list[list[str | float | int]] = []
    for method, bits in mean:
        mine = [run for run in runs if (run.method, run.bits) == (method, bits)]
        each = " ".join(f"{100 * run.accuracy:.1f}" for run in mine)
        zeros = 100 * float(np.mean([run.zeros for run in mine]))
        worst = max(run.worst for run in mine)
        projected = 100 * mine[0].projected
        rows.append([method, bits, worst, projected, 100 * mean[method, bits], each, zeros])
    columns = (
        "method",
        "bits asked for",
        "bits, worst case",
        "before training, %",
        "trained, %",
        "per seed",
        "zeros, %",
    )
    papers: list[list[float | int]] = []
    for bits, (a2q, plus) in PAPER.items():
        here = bits - LOG2_FAN_IN
        papers.append([bits, plus - a2q, here, 100 * gaps[here]])
    beside = ("bits, papers", "A2Q+ less A2Q, points", "bits, here", "A2Q+ less A2Q, points (here)")
    return [Table("Trained under a bound, W4A4", columns, rows), Table("Compared with the papers", beside, papers)]


STUDY = Study(
    name="accumulators",
    title="Narrow accumulators: overflow by chance, on data, and never",
    question=(
        "A sum of products needs more bits than its factors. How often does a narrower register overflow, what does "
        "that cost, and does it matter whether the register wraps or saturates? And what does it cost to train "
        "weights so that no input can cause an overflow?"
    ),
    method=(
        "**Pairs.** The instruction vpmaddubsw adds two products of uint8 codes and int8 weights with saturation to "
        "int16. The share of pairs that saturate is computed exactly for independent codes, and counted for the "
        "network with the kernel that graphs run.\n\n"
        "**Widths.** A 64-48-48-10 perceptron on scikit-learn's digits is quantized after training to W8A8 and W4A4 "
        "and converted once. `retarget` then gives all its products a register of each width, which either wraps or "
        "saturates after every addition. There are 500 test images.\n\n"
        "**Bounds.** The W4A4 network trains on with `qjax.training.constrain_accumulators` for 40 epochs. Every "
        "layer has the same bound, is projected after each step, and starts from scales chosen for the bound. The "
        "bounds are A2Q (|q|_1 <= (2^(P-1) - 1) / 2^4) and A2Q+ (at most half of (2^P - 2) / 15 for either sign). "
        "Seeds change the order of the images. The papers' networks train with weight normalisation instead of a "
        "projection. Their fan-in is 72 times as large, which is worth 6.2 bits, so we compare their widths with "
        "widths of 6 bits less."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Ask `qjax.accumulators` which register your graph needs, because it proves the worst case. If your "
        "register is narrower, let it saturate, and train with A2Q+ if you need a guarantee that no input overflows "
        "it. Choose the scales for the bound as well, because with calibrated scales the bound costs far more "
        "accuracy."
    ),
    command="python -m experiments accumulators",
)
