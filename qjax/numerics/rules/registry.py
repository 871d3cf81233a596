"""What a rule of requantization is, and the registry that finds one by its name."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import jax


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call of `requantize` knows besides the accumulator and the constants.

    Attributes:
      zero_point: int32, of the output's codes; it broadcasts against the accumulator without a change of rank.
      qmin: the lowest code.
      qmax: the highest code.
      key: the random key, for a rule that needs one.

    Examples:
      ```python
      from qjax.numerics import Call, Multiplier, Rule, quantize_multiplier


      def halve(acc, constants, call):  # a rule that makes the codes itself
          return jnp.clip((acc >> 1) + call.zero_point, call.qmin, call.qmax)


      rule = Rule("halve", quantize_multiplier, Multiplier, halve, finishes=True)
      print(rule.apply(jnp.array([5, 700]), rule.prepare(0.5), Call(jnp.int32(3), -128, 127)))
      ```
    """

    zero_point: jax.Array
    qmin: int
    qmax: int
    key: jax.Array | None = None


Apply = Callable[[jax.Array, Any, Call], jax.Array]


@dataclasses.dataclass(frozen=True)
class Product:
    """The shape of a product with weights, by which a runtime may choose among its kernels.

    Attributes:
      depth: how many products one accumulator adds.
      channels: of the output.
      groups: of a convolution; 1 for a matrix product, which has none of the following.
      window: the kernel's spatial sizes.
      strides: likewise.
      dilation: of the kernel; (1, ...) for none.
      padding: (low, high) by spatial axis.
      sizes: the input's spatial sizes.
    """

    depth: int
    channels: int
    groups: int = 1
    window: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to requantize.

    Attributes:
      name: what `requantize(rule=...)` calls it.
      prepare: effective scale -> constants. It runs with the same bits on the host and inside a trace. A rule
        that `takes_bias` is called as prepare(scale, bias).
      constants: the type that `prepare` returns, a NamedTuple of int32 arrays that broadcast against the
        accumulator; `requantize` takes such constants in place of a scale. A graph stores each field as a
        tensor of its name, so the names are part of the format: `constants(**fields)` restores them.
      apply: (acc, constants, call) -> int32, traced with 64-bit integers enabled. It returns the rounded acc
        * e, saturated to int32, before the zero point is added; or, if it `finishes`, the codes.
      needs_key: whether `apply` draws random numbers.
      finishes: whether `apply` adds the zero point and brings the result into [qmin, qmax] itself.
      bias: "accumulated" if the bias is a part of the accumulator; otherwise it is a constant of the rule, added in
        its arithmetic: "integer" if the rule rounds it to steps of the accumulator, "real" if it does not.
        `prepare` then takes it in steps of the accumulator, as a `Real` or float32, and without one it is 0.
      of_scales: set if the runtime computes from the scales themselves, so that the effective scale alone is not
        enough: (s_x, s_w, s_y, bias, per_channel) -> constants, with the bias a real number, and per_channel whether
        the weights have more than one scale. `prepare` is then for callers who only know an effective scale.
      real_bias: (constants, s_x * s_w as a `Real`) -> the bias as a real number, for a rule that `takes_bias`:
        another target starts from it.
      accumulators: the dtypes that `apply` takes.
      check: raises TypeError or ValueError for constants, on the host, that are not this rule's.
      variant: set if the runtime has kernels for some shapes that round differently: product -> the name of its rule,
        which takes the same constants. Conversion calls it; `requantize` under this rule's own name does not.
      monotone: whether a greater accumulator never becomes a lesser code, as long as neither it nor acc * e leaves
        (-2^30, 2^30); whether a clamp to [qmin, qmax] is the last step; and whether no element depends on its place in
        the accumulator. An emitter may then write another computation with the same codes.
      powers_of_two: whether `prepare` takes no other effective scales.

    Examples:
      ```python
      from qjax.numerics import (
          Multiplier,
          Rule,
          quantize_multiplier,
          register_rule,
          requantize,
      )


      def round_down(acc, m, call):
          product = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
          codes = product >> (31 - m.shift.astype(jnp.int64))
          return jnp.clip(codes, -(2**31), 2**31 - 1).astype(jnp.int32)


      register_rule(
          Rule(
              "round_down",
              prepare=quantize_multiplier,
              constants=Multiplier,
              apply=round_down,
          )
      )
      print(requantize(np.int32([5, -5]), 0.5, rule="round_down"))
      ```
    """

    name: str
    prepare: Callable[..., Any]
    constants: type
    apply: Apply
    needs_key: bool = False
    finishes: bool = False
    bias: Literal["accumulated", "integer", "real"] = "accumulated"
    of_scales: Callable[..., Any] | None = None
    real_bias: Callable[[Any, Any], Any] | None = None
    accumulators: tuple[str, ...] = ("int32",)
    check: Callable[[Any], None] | None = None
    variant: Callable[[Product], str] | None = None
    monotone: bool = False
    powers_of_two: bool = False

    @property
    def takes_bias(self) -> bool:
        """Whether the bias is a constant of the rule rather than a part of the accumulator."""
        return self.bias != "accumulated"

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the constants, in order."""
        return tuple(getattr(self.constants, "_fields", ()))


@dataclasses.dataclass(frozen=True)
class _Family:
    forms: tuple[str, ...]
    build: Callable[[str, list[str]], Rule]


_RULES: dict[str, Rule] = {}
_FAMILIES: dict[str, _Family] = {}


def register_rule(rule: Rule) -> Rule:
    """Add a rule to the registry; each name can be used only once.

    Args:
      rule: the rule.

    Examples:
      ```python
      import dataclasses

      from qjax import numerics

      numerics.register_rule(
          dataclasses.replace(numerics.get_rule("single_round"), name="my_rule")
      )
      target = qjax.targets.get("tflite_micro").replace(
          name="my_rounding_chip", requantize="my_rule"
      )
      ```
    """
    if rule.name in _RULES:
        raise ValueError(f"a rule named {rule.name!r} exists already; choose another name.")
    _RULES[rule.name] = rule
    return rule


def registered(name: str, **fields: Any) -> Callable[[Apply], Apply]:
    """A decorator that registers a function as the `apply` of a rule; fields: those of `Rule`."""

    def register(apply: Apply) -> Apply:
        register_rule(Rule(name, apply=apply, **fields))
        return apply

    return register


def register_family(name: str, forms: tuple[str, ...], build: Callable[[str, list[str]], Rule]) -> None:
    """Add rules with parameters, "name:first:second".

    Args:
      name: the part of the name before the first colon.
      forms: what an error about an unknown rule lists, such as "power_of_two:ROUNDING:OVERFLOW".
      build: (full name, parameters) -> the rule; a ValueError that lists the valid parameters otherwise.

    Examples:
      ```python
      import dataclasses

      from qjax import numerics


      def build(name, parameters):
          return dataclasses.replace(numerics.get_rule(parameters[0]), name=name)


      numerics.register_family("renamed", ("renamed:RULE",), build)
      print(numerics.requantize(np.int32([5, 7]), 0.5, rule="renamed:nearest_even"))
      ```
    """
    if name in _FAMILIES:
        raise ValueError(f"a family of rules named {name!r} exists already; choose another name.")
    _FAMILIES[name] = _Family(forms, build)


def rule_names() -> tuple[str, ...]:
    """The names of all rules, sorted; of a rule with parameters, the name for their defaults.

    Examples:
      >>> from qjax import numerics
      >>> "nearest_even" in numerics.rule_names()
      True
    """
    return tuple(sorted(_RULES))


def get_rule(name: str) -> Rule:
    """The rule called `name`; a ValueError that lists the valid names otherwise.

    Args:
      name: of the rule, with its parameters behind colons where it has some.

    Examples:
      >>> from qjax import numerics
      >>> numerics.get_rule("power_of_two:TRN:WRAP").name
      'power_of_two:TRN:WRAP'
    """
    if name in _RULES:
        return _RULES[name]
    family, *parameters = name.split(":")
    if parameters and family in _FAMILIES:
        return _member(name)
    forms = [*rule_names(), *sorted(form for family in _FAMILIES.values() for form in family.forms)]
    raise ValueError(f"rule must be one of {', '.join(forms)}. Got {name!r}.")


@cache
def _member(name: str) -> Rule:
    """Caches one object per name, because `jit` looks its programs up by the rule."""
    family, *parameters = name.split(":")
    return _FAMILIES[family].build(name, parameters)
