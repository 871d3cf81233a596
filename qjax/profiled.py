"""What `quantize` says of a model and the device that its recipe names: every violation at once, before training."""

from collections.abc import Callable, Mapping, Sequence

from qjax import profiles
from qjax.calibration.learned import Quantizer
from qjax.explanation import Explained
from qjax.export.contents import check_graph
from qjax.graph.ir import Graph
from qjax.lower import ConversionError
from qjax.profiles import Profile, Verdict, Violation
from qjax.tracing import Place


def refuse_model(
    name: str,
    quantizers: Mapping[str, Quantizer],
    places: Mapping[str, Place],
    refused: Sequence[Explained],
    convert: Callable[[], Graph],
) -> None:
    """Raise a ProfileError for what the recipe and the model's structure break.

    Args:
      name: of the profile. refused: the equations without an integer form. convert: the graph of the model with
        its present numbers; the rules that depend on trained numbers are left to `qjax.convert`.
    """
    profile = profiles.get(name)
    found = [violation for key, q in quantizers.items() for violation in _of_quantizer(profile, q, places[key])]
    for row in refused:
        cure = " ".join(row.cures)
        found.append(Violation("integers", row.module or row.primitive, "an integer form", row.problem, cure, "", None))
    operators: tuple[tuple[str, int], ...] = ()
    if not refused:
        try:
            # Faults of a spec were reported above, with its quantizer, so do not report them again.
            verdict = check_graph(convert(), profile, trained=False, scheme=not found)
        except ConversionError as error:
            found.append(Violation("integers", "the model", "a graph of integers", str(error), "See there."))
        else:
            found += verdict.violations
            operators = verdict.operators
    Verdict(profile, tuple(found), operators).refuse("quantize")


def _of_quantizer(profile: Profile, quantizer: Quantizer, place: Place) -> Sequence[Violation]:
    return list(profiles.check_spec(profile, place.kind, quantizer.spec, f"quantizer {place.name!r}", place.location))
