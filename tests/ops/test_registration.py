"""An operation that does not state its facts is not registered; what an op says to be an identity is one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qjax import ops
from qjax.ops import Role
from qjax.ops.base import Elementwise, Op, register
from qjax.ops.facts import AverageFacts, Facts, ProductFacts
from qjax.ops.fields import NoFields
from qjax.ops.required import missing


class Silent(Op):
    """States neither fact."""

    name = "silent"
    role = Role.PRODUCER


class Half(Silent):
    name = "half"

    def accumulator(self, site: Any) -> None:
        return None


UNSTATED = "fields, keeps_batch, operation, scales, takes_steps"


@pytest.mark.parametrize(
    ("cls", "missing"),
    [(Silent, f"accumulator, {UNSTATED}, works_along"), (Half, f"{UNSTATED}, works_along")],
)
def test_an_operation_without_the_facts_is_not_registered(cls: Any, missing: str) -> None:
    with pytest.raises(TypeError, match=f"'{cls.__name__}' does not state {missing}. Define"):
        register(cls)
    assert cls.name not in ops.names()


def stating(role: Role, **facts: Any) -> dict[str, Any]:
    """A class body with all facts that an op of the role must state."""
    every = dict.fromkeys(("accumulator", "works_along", "keeps_batch"), lambda self, *known: None)
    return {"name": "complete", "role": role, "fields": NoFields, **every, **facts}


COMPLETE = {
    "a sum": stating(Role.PRODUCER, takes_steps=True, operation=lambda self, a: None, scales=lambda self, a, i: i),
    "a table": stating(Role.PRODUCER, takes_steps=True, prepare=lambda self, g: g, restated=lambda self, g: None),
    "a step": stating(
        Role.CHAIN, clamps=False, compose=lambda self, a, c, x: x, has_integer_form=lambda self, eqn: True
    ),
    "a clamp": stating(
        Role.CHAIN,
        clamps=True,
        bounds=lambda self, a, c: (0, 1),
        compose=lambda self, a, c, x: x,
        has_integer_form=lambda self, eqn: True,
    ),
    "a lookup": stating(
        Role.GRID,
        filling=lambda self, a: "none",
        integers=lambda self, e, c: (1,),
        refuses=lambda self, *a: None,
        misplaced=lambda self, *a: None,
    ),
    "a weight": stating(
        Role.GRID,
        filling=lambda self, a: "none",
        weight_axes=lambda self, e, i: (1,),
        channels=lambda self, e, i: [[1, 1]],
    ),
}
"""A minimal operation of each kind: without any one of its facts it is an error."""
OWN = {"name", "role", "integers", "weight_axes", "prepare"}
"""What makes the operation one of its kind; the facts follow from these."""


@pytest.mark.parametrize("kind", COMPLETE)
def test_a_forgotten_fact_is_an_error(kind: str) -> None:
    facts = COMPLETE[kind]
    assert missing(type("Complete", (Op,), facts), (Op, Facts)) == []
    for name in facts.keys() - OWN:
        cls = type("Forgetful", (Op,), {other: fact for other, fact in facts.items() if other != name})
        # without `clamps` nothing says that the op bounds numbers, but the fact itself is missing
        assert missing(cls, (Op, Facts)) == [name]
        with pytest.raises(TypeError, match=f"'Forgetful' does not state {name}. Define"):
            register(cls)
    assert "complete" not in ops.names()


def test_bounds_without_the_fact_that_it_clamps_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"'Forgetful' must state `clamps = True` if it defines `bounds`"):
        register(type("Forgetful", (Op,), {**COMPLETE["a clamp"], "clamps": False}))


def test_an_operation_of_several_operands_says_which_may_be_constant() -> None:
    eqn: Any = None
    assert Op.reads(ops.get("sum"), eqn, [False])
    assert not Op.reads(ops.get("sum"), eqn, [False, True])


class Averaging(AverageFacts, Elementwise):
    """States neither whether it is an average nor under which name targets know it."""

    name = "averaging"
    role = Role.PRODUCER


def test_sums_and_products_state_more() -> None:
    match = (
        r"'Averaging' does not state average, fields, is_average, is_spatial, operation, scales, takes_steps. Define"
    )
    with pytest.raises(TypeError, match=match):
        register(Averaging)
    with pytest.raises(TypeError, match=r"does not state .*, groups_scales, .*, kind, .*, permutable, products, .*"):
        register(type("Summing", (ProductFacts, Silent), {"name": "summing"}))


IDENTITIES = {
    "reshape": ({"shape": [2, 3]}, {"shape": [3, 2]}),
    "transpose": ({"permutation": [0, 1]}, {"permutation": [1, 0]}),
    "broadcast": ({"shape": [2, 3], "dimensions": [0, 1]}, {"shape": [2, 2, 3], "dimensions": [1, 2]}),
    "slice": (
        {"start": [0, 0], "limit": [2, None], "strides": [1, 1]},
        {"start": [0, 1], "limit": [2, None], "strides": [1, 1]},
    ),
    "cast": ({}, None),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_an_identity_returns_its_input(name: str) -> None:
    same, other = IDENTITIES[name]
    codes, op = np.arange(6, dtype=np.int8).reshape(2, 3), ops.get(name)
    assert np.array_equal(op.kernel(same, {}, [jnp.asarray(codes)]), codes)
    assert op.is_identity(same, (2, 3), (2, 3))
    # None is any size: every second example has the shape of all examples
    assert name != "slice" or not op.is_identity({**same, "strides": [2, 1]}, (None, 3), (None, 3))
    if other is not None:
        result = op.kernel(other, {}, [jnp.asarray(codes)])
        assert not op.is_identity(other, (2, 3), result.shape)


def test_what_no_op_says_to_be_an_identity_stays() -> None:
    assert {name for name in ops.names() if type(ops.get(name)).is_identity is not Op.is_identity} == set(IDENTITIES)
