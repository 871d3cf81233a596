"""An elementwise function of one real variable, written as a list of steps: plain data that fits JSON.

Value 0 is the variable, values 1, ..., p are scalar parameters (a learned slope), and every step adds one value. A step
is a primitive and its operands: the number of an earlier value, or a literal. Literals are exact: a real is the
hexadecimal string of a float ("0x1.8p+1"; "inf", "-inf"), a truth value is true or false.

    x * sigmoid(x):    [0, [["logistic", [0]], ["mul", [0, 1]]]]

Steps are functions of real numbers. Intermediate results are not rounded, zero has no sign, and `x != x` is always
false. 1/0 is infinite. What has no value in the extended real numbers (0/0, the logarithm of -1) is NaN.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Operand = int | str | bool

_ONE = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite log log1p "
    "logistic neg not round_away round_even rsqrt sign sin sinh sqrt square tan tanh"
)
_TWO = "add and div eq ge gt le lt max min mul ne or pow rem sub xor integer_pow"

PRIMITIVES: Mapping[str, int] = {
    **dict.fromkeys(_ONE.split(), 1),
    **dict.fromkeys(_TWO.split(), 2),
    "select": 3,
    "clamp": 3,
}
"""Number of operands by name; named and ordered as in `jax.lax`.

"select" takes the truth value, then the value for false, then the value for true; the second operand of "integer_pow"
is a literal.
"""

BOOLEAN = frozenset({"eq", "ge", "gt", "le", "lt", "ne", "is_finite"})
"""Primitives whose result is a truth value; "not", "and", "or" and "xor" also take truth values."""

_LOGIC = frozenset({"not", "and", "or", "xor"})
_LARGEST_POWER = 256
_MOST_STEPS = 2000


@dataclasses.dataclass(frozen=True)
class Expression:
    """See the module's docstring.

    steps: (primitive, operands). parameters: how many scalar parameters there are. The result is the last value.

    Raises:
      ValueError: an unknown primitive, a wrong number of operands, an operand that refers to no earlier step, a literal
        that is no float, an integer power beyond 256.
    """

    steps: tuple[tuple[str, tuple[Operand, ...]], ...]
    parameters: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.steps) <= _MOST_STEPS:
            raise ValueError(f"Expression: expected 1 to {_MOST_STEPS} steps. Got {len(self.steps)}.")
        if type(self.parameters) is not int or not 0 <= self.parameters <= _MOST_STEPS:
            raise ValueError(f"Expression: expected 0 or more parameters. Got {self.parameters!r}.")
        for index, (primitive, operands) in enumerate(self.steps):
            count = PRIMITIVES.get(primitive)
            if count is None or len(operands) != count:
                wanted = f"a primitive out of {', '.join(PRIMITIVES)}" if count is None else f"{count} operands"
                raise ValueError(f"Expression, step {index}: expected {wanted}. Got {primitive!r} on {operands}.")
            for operand in operands:
                self._check(index, operand)
            if primitive == "integer_pow":
                power = operands[1]
                if not isinstance(power, str) or not number(power).is_integer() or abs(number(power)) > _LARGEST_POWER:
                    raise ValueError(
                        f"Expression, step {index}: expected an integer power up to {_LARGEST_POWER} as a literal. "
                        f"Got {power!r}."
                    )

    def _check(self, index: int, operand: Any) -> None:
        if type(operand) is bool:
            return
        if type(operand) is int and 0 <= operand <= self.parameters + index:
            return
        if type(operand) is str and len(operand) < 40:
            try:
                float.fromhex(operand)
            except (ValueError, OverflowError):
                pass
            else:
                return
        raise ValueError(
            f"Expression, step {index}: expected the number of an earlier value, a float as a hexadecimal string, or a "
            f"truth value. Got {operand!r}."
        )

    @property
    def bare(self) -> str | None:
        """The name of the function if it is a single primitive of the variable."""
        if len(self.steps) == 1 and self.steps[0][1] == (0,):
            return self.steps[0][0]
        return None

    def to_json(self) -> list[Any]:
        """The expression as JSON values: the number of its parameters, and its steps."""
        return [self.parameters, [[name, list(operands)] for name, operands in self.steps]]

    @classmethod
    def from_json(cls, value: Any) -> "Expression":
        """The inverse of `to_json`. Raises a ValueError for anything else."""
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError(f"Expression: expected [number of parameters, steps]. Got {value!r}.")
        parameters, steps = value
        if not isinstance(steps, Sequence) or not all(_is_step(step) for step in steps):
            raise ValueError(f"Expression: expected a list of [primitive, [operand, ...]]. Got {steps!r}.")
        return cls(tuple((name, tuple(operands)) for name, operands in steps), parameters)


def _is_step(step: Any) -> bool:
    pair = isinstance(step, Sequence) and not isinstance(step, str) and len(step) == 2
    return pair and isinstance(step[0], str) and isinstance(step[1], Sequence) and not isinstance(step[1], str)


def literal(value: Any) -> str | bool:
    """A Python or numpy number as a literal operand; of a float of any format its exact value."""
    if value is True or value is False or str(getattr(value, "dtype", "")) == "bool":
        return bool(value)
    return float(value).hex()


def number(operand: str) -> float:
    """The real number of a literal."""
    return float.fromhex(operand)
