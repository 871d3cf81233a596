"""Checks a profile's rules on the operators of a file, or on the specs of a recipe."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from qjax.contrib.profiles.base import Profile
from qjax.contrib.profiles.operators import Operator
from qjax.contrib.profiles.scheme import Specs
from qjax.contrib.profiles.verdict import Verdict, Violation
from qjax.numerics.qspec import QSpec


def check_operators(
    profile: Profile, operators: Sequence[Operator], *, trained: bool = True, scheme: bool = True
) -> Verdict:
    """Check every operator against every rule.

    Args:
      profile: the device.
      operators: those of a file.
      trained: whether the values of the weights are final; False leaves out the rules that depend on them.
      scheme: False leaves out the rules about bits, signs and zero points, because they were checked already.

    Examples:
      >>> from qjax import profiles
      >>> x, y = profiles.Tensor("x", (1, 8), "int8"), profiles.Tensor("y", (1, 8), "int8")
      >>> verdict = profiles.check_operators(
      ...     profiles.get("ethos_u"), [profiles.Operator("MY_OP", "node", (x,), (y,))]
      ... )
      >>> len(verdict.violations) > 0
      True
    """
    found: list[Violation] = []
    rules = [rule for rule in profile.rules if (trained or not rule.numbers) and (scheme or not rule.scheme)]
    for index, operator in enumerate(operators):
        broken = list(_of_operator(profile, rules, operator))
        if broken and profile.cut and not found and index + 1 < len(operators):
            behind = len(operators) - index - 1
            broken[0] = dataclasses.replace(
                broken[0], came=f"{broken[0].came}; the {behind} operators after it cannot run there either"
            )
        found += broken
    counts = Counter(operator.name for operator in operators)
    return Verdict(profile, tuple(found), tuple(counts.items()))


def _of_operator(profile: Profile, rules: Iterable, operator: Operator) -> Iterator[Violation]:
    node = operator.name if operator.node == operator.name else f"{operator.node!r} ({operator.name})"
    if operator.name not in profile.known:
        source = next((str(group.source) for group in profile.operators), "")
        yield Violation(
            "operators",
            node,
            "an operator that the profile lists",
            f"{operator.name}, not known for this device",
            "Express it with listed operators, or remove it from this part of the model.",
            source,
            operator.location,
        )
        return
    for rule in rules:
        came = rule.came(operator)
        if came is not None:
            yield Violation(rule.name, node, rule.expected, came, rule.cure, str(rule.source), operator.location)


def check_spec(
    profile: Profile, kind: str, spec: QSpec, where: str, location: str | None = None
) -> Iterator[Violation]:
    """List the violations of one spec.

    Args:
      profile: the device.
      kind: "weight", or anything else for an activation.
      spec: the codes.
      where: the owner of the spec, for the message.
      location: the user's "file:line", if there is one.

    Examples:
      >>> import qjax
      >>> from qjax import profiles
      >>> found = profiles.check_spec(
      ...     profiles.get("ethos_u"), "weight", qjax.QSpec(bits=4), "fc/kernel"
      ... )
      >>> [violation.came for violation in found]
      ['4']
    """
    allowed: Specs = profile.scheme.weights if kind == "weight" else profile.scheme.activations
    name, given = ("weights", profile.weights) if kind == "weight" else ("activations", profile.activations)
    for wrong in allowed.wrong(spec):
        expected, _, came = wrong.removeprefix("expected ").partition(", got ")
        cure = f"Leave {name} out of the recipe, or use {name}={_spell_spec(given)}."
        yield Violation(name, where, expected, came, cure, str(profile.scheme.source), location)


def _spell_spec(spec: QSpec) -> str:
    """A spec as a user would write it, without fields that have their default."""
    default = QSpec()
    fields = [f"bits={spec.bits}"]
    for field in ("signed", "symmetric", "axis"):
        if getattr(spec, field) != getattr(default, field):
            fields.append(f"{field}={getattr(spec, field)}")
    if spec.narrow_range != (spec.symmetric and spec.signed):
        fields.append(f"narrow_range={spec.narrow_range}")
    return f"QSpec({', '.join(fields)})"
