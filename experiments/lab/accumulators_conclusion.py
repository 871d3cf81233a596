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
            f"**Pairs.** Independent uniform codes and weights clamp {uniform:.2%} of the pairs, weights of deviation "
            f"32 one in {1 / values['pairs clamped, uint8 codes, sigma 32']:,.0f}. "
            f"The network's own pairs are not independent: {clamped['share']:.2%} were clamped, and the accuracy went "
            f"from {clamped['exact']:.1%} to {clamped['accuracy']:.1%}. Codes of 7 bits clamp none.",
            f"**Widths.** No input takes the W8A8 network beyond {eight.worst} bits. A wrapping register is harmless "
            f"(within a point) from {harmless['wrap']} bits, a saturating one from {harmless['saturate']}. Below that "
            f"saturating is up to {ahead:.0f} points ahead. At {min(eight.widths)} bits wrapping is at "
            f"{least['wrap']:.0%} and saturating at {least['saturate']:.0%}. Harmless is a finding about these images; "
            "only the worst case is a promise.",
            f"**Bounds.** Trained under the bound, no register of the requested width overflowed, neither in the worst "
            f"case nor on data ({changed:.0f} codes changed). The bias is added after the register, in 32 bits. "
            "Training "
            f"freely reaches {drawn['free']:.1%}. A2Q stays within a point of it down to {narrow['A2Q']} bits, with "
            f"{zeros['A2Q']:.0%} of the weights zero. A2Q+ does down to {narrow['A2Q+']} bits, with "
            f"{zeros['A2Q+']:.0%}.",
            f"| bits | A2Q+ less A2Q, points |\n| --- | --- |\n{gaps}",
            f"The gap grows as registers get narrower until A2Q is at chance. {reverse} "
            f"A2Q+ with one bit less is as good as A2Q ({one_bit:+.1f} points on average). Its norm is twice as "
            "large, because codes that are never negative cannot make both signs push the same way.",
            f"**What it does not buy.** The W4A4 network was also run without any bound or training. In a "
            f"saturating register it reached {saturating[10]:.1%} at 10 bits. At 9 it reached {saturating[9]:.1%}. "
            f"At 8 it reached {saturating[8]:.1%}{cheap}. But nothing guarantees this.",
            f"**Scales matter as much as the method.** With calibrated scales A2Q at {CALIBRATED_BITS} bits reaches "
            f"{drawn['calibrated']:.1%} instead of {mean['A2Q'][CALIBRATED_BITS]:.1%}. A small norm is then used up by "
            "a few large codes. The scale of a projected weight has no gradient that would tell it so.",
            "**What differs from the papers.** Weights are projected, not reparameterised. Codes are rounded to "
            "nearest. Every layer is bound, the first and the last too. The network is small. The fall begins "
            "where log2 of the fan-in says. It is steeper, because the norm at the narrowest is a handful of codes.",
        ]
    )
