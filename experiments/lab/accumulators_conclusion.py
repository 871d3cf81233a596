"""What the study of accumulators comes to, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.accumulators_training import CALIBRATED_BITS, NARROW, Run
from experiments.lab.accumulators_widths import Widths


def conclusion(values: Mapping[str, float], drawn: Mapping[str, Any], eight: Widths, runs: Sequence[Run]) -> str:
    """Markdown."""
    mean = {m: dict(drawn["trained"][m]) for m in ("A2Q", "A2Q+")}
    clamped, uniform = drawn["clamped"], values["pairs clamped, uint8 codes, uniform weights"]
    harmless = {o: eight.narrowest(o) for o in ("wrap", "saturate")}
    kept = {m: [b for b in NARROW if mean[m][b] >= drawn["free"] - 0.01] for m in mean}
    narrow = {m: min(bits, default=max(NARROW)) for m, bits in kept.items()}
    zeros = {m: float(np.mean([run.zeros for run in runs if (run.method, run.bits) == (m, narrow[m])])) for m in mean}
    gaps = "\n".join(f"| {b} | {100 * (mean['A2Q+'][b] - mean['A2Q'][b]):+.1f} |" for b in NARROW)
    behind = [b for b in NARROW if mean["A2Q+"][b] < mean["A2Q"][b]]
    deficit = max((mean["A2Q"][b] - mean["A2Q+"][b] for b in behind), default=0.0)
    reverse = (
        f"At {' and '.join(map(str, behind))} bits A2Q+ was behind, by {100 * deficit:.1f} points at most."
        if behind
        else "A2Q+ was behind at no width."
    )
    found = drawn["widths"]["4"]
    saturating = {b: found["saturate"][found["widths"].index(b)] for b in NARROW}
    beaten = [b for b in NARROW if saturating[b] > mean["A2Q+"][b]]
    cheap = f", and was more accurate than A2Q+ at {' and '.join(map(str, beaten))} bits" if beaten else ""
    least = {o: values_at[eight.widths.index(min(eight.widths))] for o, values_at in eight.accuracies.items()}
    ahead = 100 * values["W8A8: greatest advantage of saturating over wrapping, accuracy"]
    changed = values["codes changed by a wrapping register of the bits trained for"]
    one_bit = 100 * values["A2Q+ at P - 1 bits less A2Q at P bits, mean over P = 10, 9, 8"]
    return "\n\n".join(
        [
            f"**Pairs.** With independent uniform codes and weights, {uniform:.2%} of the pairs saturate; with "
            f"weights of standard deviation 32, one in {1 / values['pairs clamped, uint8 codes, sigma 32']:,.0f} "
            f"does. The network's own pairs are not independent: {clamped['share']:.2%} saturated, and the accuracy "
            f"went from {clamped['exact']:.1%} to {clamped['accuracy']:.1%}. With 7-bit codes no pair can saturate.",
            f"**Widths.** No input can make the W8A8 network need more than {eight.worst} bits. A wrapping register "
            f"costs less than a point from {harmless['wrap']} bits upwards, a saturating one from "
            f"{harmless['saturate']}. With fewer bits, saturating is up to {ahead:.0f} points more accurate. At "
            f"{min(eight.widths)} bits wrapping reaches {least['wrap']:.0%} and saturating {least['saturate']:.0%}. "
            "These thresholds were observed on these images; only the worst case is guaranteed.",
            "**Bounds.** After training under the bound, no register of the requested width overflowed, neither in "
            f"the worst case nor on data ({changed:.0f} codes changed). The bias is added after the register, in 32 "
            f"bits. Training without a bound reaches {drawn['free']:.1%}. A2Q stays within a point of that down to "
            f"{narrow['A2Q']} bits, with {zeros['A2Q']:.0%} of the weights zero. A2Q+ does so down to "
            f"{narrow['A2Q+']} bits, with {zeros['A2Q+']:.0%} of them zero.",
            f"| bits | A2Q+ less A2Q, points |\n| --- | --- |\n{gaps}",
            f"The gap grows as registers get narrower, until A2Q is at chance. {reverse} A2Q+ with one bit less is "
            f"as accurate as A2Q ({one_bit:+.1f} points on average). A2Q+ allows twice the norm, because with "
            "nonnegative codes positive and negative weights cannot push the sum in the same direction.",
            "**What it does not buy.** We also ran the W4A4 network without any bound or training in a saturating "
            f"register. It reached {saturating[10]:.1%} at 10 bits. At 9 bits it reached {saturating[9]:.1%}. At 8 "
            f"bits it reached {saturating[8]:.1%}{cheap}, but none of this is guaranteed for other inputs.",
            f"**Scales matter as much as the method.** With calibrated scales, A2Q at {CALIBRATED_BITS} bits reaches "
            f"{drawn['calibrated']:.1%} instead of {mean['A2Q'][CALIBRATED_BITS]:.1%}, because a few large codes use "
            "up the small norm. Training cannot correct this, because the bound has no gradient with respect to the "
            "scale of a projected weight.",
            "**What differs from the papers.** Here weights are projected rather than reparameterised, codes are "
            "rounded to nearest, and every layer is bounded, including the first and the last. The network is also "
            "small. Accuracy begins to fall at the width that log2 of the fan-in predicts, but falls more steeply, "
            "because at the narrowest widths the norm allows only a handful of codes.",
        ]
    )
