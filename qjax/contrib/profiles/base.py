"""A profile: the requirements of one device, the source of each of them, and proposals for a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qjax.contrib.profiles.presets import OVERRIDES
from qjax.contrib.profiles.rules import Rule, Source
from qjax.contrib.profiles.scheme import Scheme
from qjax.numerics.qspec import QSpec
from qjax.support.names import did_you_mean


@dataclasses.dataclass(frozen=True)
class Known:
    """Operators of the format that the device supports. An operator that no profile lists is a violation.

    Args:
      names: of the operators, as the format spells them.
      source: where the vendor documents it.

    Examples:
      >>> from qjax import profiles
      >>> known = profiles.Known(
      ...     frozenset({"CONV_2D", "ADD"}),
      ...     profiles.Source("data sheet, version 3", "https://example.com"),
      ... )
    """

    names: frozenset[str]
    source: Source


def known(names: str, source: Source) -> Known:
    """`Known` with the names in one string.

    Args:
      names: of operators, separated by spaces.
      source: where the vendor documents it.

    Examples:
      >>> from qjax import profiles
      >>> sorted(
      ...     profiles.known(
      ...         "CONV_2D ADD", profiles.Source("data sheet, version 3", "https://example.com")
      ...     ).names
      ... )
      ['ADD', 'CONV_2D']
    """
    return Known(frozenset(names.split()), source)


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """The requirements of one device, or of one part of it.

    Args:
      name: how recipes and the command line refer to it.
      title: the device and the version of its rules.
      targets: the targets that a recipe may have. The first one is proposed.
      weights: the proposed codes of weights.
      activations: the proposed codes of activations.
      scheme: the codes that are allowed.
      format: the format of the files that are checked.
      operators: the operators that the device supports.
      rules: its requirements for these operators.
      otherwise: what happens to an operator that breaks a rule.
      proof: what was run, and what could not be run without the device.
      options: options of the emitter.
      emits: whether qjax writes a file that the device or its compiler accepts. Otherwise only the rules are checked.
      cut: whether everything after the first operator that breaks a rule runs elsewhere, too.
      floats: whether its files may contain float parts with `qjax.Dynamic`.
      recipe: further fields of `Recipe` that are proposed.

    Examples:
      >>> from qjax import profiles
      >>> profiles.get("ethos_u").targets[0]
      'tflite_micro'
    """

    name: str
    title: str
    targets: tuple[str, ...]
    weights: QSpec
    activations: QSpec
    scheme: Scheme
    format: str
    operators: tuple[Known, ...]
    rules: tuple[Rule, ...]
    otherwise: str
    proof: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    emits: bool = True
    cut: bool = False
    floats: bool = False
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """All operators that it lists."""
        return frozenset(name for group in self.operators for name in group.names)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every source once, in order."""
        found = [self.scheme.source, *(group.source for group in self.operators), *(r.source for r in self.rules)]
        return tuple(dict.fromkeys(found))


_profiles: dict[str, Profile] = {}


def register(profile: Profile) -> Profile:
    """Register a profile by its name.

    Args:
      profile: the profile.

    Raises:
      ValueError: another profile has this name.

    Examples:
      ```python
      import dataclasses

      from qjax.contrib import profiles

      profiles.register(
          dataclasses.replace(profiles.get("ethos_u"), name="my_npu", title="My NPU")
      )
      recipe = qjax.Recipe(profile="my_npu")
      ```
    """
    if _profiles.setdefault(profile.name, profile) is not profile:
        raise ValueError(f"Another profile is registered under the name {profile.name!r}.")
    return profile


def get(name: "str | Profile") -> Profile:
    """The profile with that name; a `Profile` is returned unchanged.

    Args:
      name: the name of a registered profile, or a `Profile`.

    Raises:
      ValueError: there is none.

    Examples:
      >>> from qjax import profiles
      >>> profiles.get("tensorrt").title
      'NVIDIA TensorRT 11'
    """
    if isinstance(name, Profile):
        return name
    if name not in _profiles:
        raise ValueError(
            f"Unknown profile {name!r}.{did_you_mean(str(name), (*names(), *OVERRIDES))} Known profiles: "
            f"{', '.join(names())}. Recipes also take {', '.join(OVERRIDES)}."
        )
    return _profiles[name]


def names() -> tuple[str, ...]:
    """The names of all registered profiles.

    Examples:
      >>> from qjax import profiles
      >>> "ethos_u" in profiles.names()
      True
    """
    return tuple(sorted(_profiles))
