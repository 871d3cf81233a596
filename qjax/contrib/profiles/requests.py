"""What the core asks of profiles: the checks of a recipe, of a model and of a file that is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qjax.api.explain import Explained
from qjax.calibration.learned import Quantizer
from qjax.contrib.profiles.base import Profile, get, names, register
from qjax.contrib.profiles.check import check_spec
from qjax.contrib.profiles.contents import check_file, check_graph
from qjax.contrib.profiles.page import devices_table, rules_table
from qjax.contrib.profiles.presets import OVERRIDES
from qjax.contrib.profiles.verdict import ProfileError, Verdict, Violation
from qjax.graph.ir import PROFILE, Graph
from qjax.lower import ConversionError
from qjax.numerics.qspec import QSpec
from qjax.tracing import Place

__all__ = [
    "check_file",
    "check_graph",
    "check_model",
    "check_options",
    "check_recipe",
    "devices_table",
    "get",
    "names",
    "overrides_of",
    "register",
    "rules_table",
]


def overrides_of(name: str | Profile) -> Mapping[str, Any] | None:
    """The overrides of a profile that is nothing else; None for a device, whose profile has rules."""
    return OVERRIDES.get(name) if isinstance(name, str) else None


def check_recipe(profile: Profile, target: str, specs: Mapping[str, Any]) -> None:
    """Raise a ProfileError for the rules that a recipe breaks.

    Args:
      target: the name of its target. specs: "weights" and "activations"; only a `QSpec` is checked.
    """
    found = list[Violation]()
    if target not in profile.targets:
        allowed, cure = ", ".join(profile.targets), f"Leave target out, or use target={profile.targets[0]!r}."
        found.append(Violation("target", "target", f"one of {allowed}", target, cure))
    for kind, spec in specs.items():
        if isinstance(spec, QSpec):
            found += check_spec(profile, kind.removesuffix("s"), spec, kind)
    Verdict(profile, tuple(found)).refuse("Recipe")


def check_model(
    name: str,
    quantizers: Mapping[str, Quantizer],
    places: Mapping[str, Place],
    refused: Sequence[Explained],
    convert: Callable[[], Graph],
) -> None:
    """Raise a ProfileError for the rules that the recipe and the model's structure break.

    Args:
      name: of the profile. refused: the equations without an integer form. convert: makes the graph of the model from
        its present numbers; the rules that depend on trained numbers are left to `qjax.convert`.
    """
    profile = get(name)

    def of_quantizer(quantizer: Quantizer, place: Place) -> Iterable[Violation]:
        return check_spec(profile, place.kind, quantizer.spec, f"quantizer {place.name!r}", place.location)

    found = [violation for key, q in quantizers.items() for violation in of_quantizer(q, places[key])]
    for row in refused:
        cure = " ".join(row.cures)
        found.append(Violation("integers", row.module or row.primitive, "an integer form", row.problem, cure, "", None))
    operators: tuple[tuple[str, int], ...] = ()
    if not refused:
        try:
            # The quantizers above have reported the faults of specs already, so do not report them again.
            verdict = check_graph(convert(), profile, trained=False, scheme=not found)
        except ConversionError as error:
            found.append(Violation("integers", "the model", "a graph of integers", str(error), "See there."))
        else:
            found += verdict.violations
            operators = verdict.operators
    Verdict(profile, tuple(found), operators).refuse("quantize")


def check_options(graph: Graph, format: str, asked: str | Profile | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the file of a graph by the profile that the user asks for, or by the graph's own if it takes that format.

    Args:
      given: the options of the emitter.

    Returns:
      The options: those of the profile, and those of the user that it leaves open.

    Raises:
      ProfileError: the file breaks rules, an option contradicts the profile, or the device of the requested profile
        takes another format.
    """
    profile = _profile_for(graph, format, asked)
    if profile is None:
        return dict(given)
    options = _options_for(profile, given)
    check_graph(graph, profile, options=options).refuse("emit")
    return options


def _profile_for(graph: Graph, format: str, asked: str | Profile | None) -> Profile | None:
    """The profile by which a file is checked; None if it is for no particular device."""
    if asked is None:
        name = graph.metadata.get(PROFILE)
        known = None if name is None else get(name)
        return known if known is not None and known.emits and known.format == format else None
    known = get(asked)
    if not known.emits:
        raise ProfileError(
            f"emit: profile {known.name!r}: qjax writes no file that this device takes. graph.check({known.name!r}) "
            "judges the graph."
        )
    if format != known.format:
        raise ProfileError(f"emit: profile {known.name!r}: expected the format {known.format!r}, got {format!r}.")
    return known


def _options_for(profile: Profile, given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name in profile.options and value != profile.options[name]:
            raise ProfileError(
                f"emit: profile {profile.name!r}: expected {name}={profile.options[name]!r}, got {name}={value!r}. "
                "Leave it out."
            )
    return {**given, **profile.options}
