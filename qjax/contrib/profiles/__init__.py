"""Profiles (`qjax.profiles`): the requirements of devices as data, each rule with its source.

    recipe = qjax.Recipe(profile="ethos_u")  # fills in target, weights, activations
    print(graph.check("ethos_u"))  # every rule that the emitted file breaks

A profile is checked on the operators of the file that it emits, under the names in the vendor's documents. Anything
that a profile does not list is a violation.
"""

from qjax.contrib.profiles import devices, rules
from qjax.contrib.profiles.base import Known, Profile, get, known, names, register
from qjax.contrib.profiles.check import check_operators, check_spec
from qjax.contrib.profiles.operators import PARAMETERS, Operator, Tensor
from qjax.contrib.profiles.rules import Rule, Source
from qjax.contrib.profiles.scheme import Scheme, Specs, specs
from qjax.contrib.profiles.verdict import ProfileError, Verdict, Violation

__all__ = [
    "PARAMETERS",
    "Known",
    "Operator",
    "Profile",
    "ProfileError",
    "Rule",
    "Scheme",
    "Source",
    "Specs",
    "Tensor",
    "Verdict",
    "Violation",
    "check_operators",
    "check_spec",
    "devices",
    "get",
    "known",
    "names",
    "register",
    "rules",
    "specs",
]
