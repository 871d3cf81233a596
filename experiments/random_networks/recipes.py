"""Random recipes: bits, granularity, methods, observers, overrides, for a target."""

import random
from typing import Any

import qjax
from experiments.random_networks.grammar import Program
from qjax.numerics import QSpec

METHODS = ("lsq", "lsq", "lsq", "static", "static", "lsq_plus", "pact", "tqt")
WEIGHT_METHODS = ("lsq", "lsq", "lsq", "static", "static", "tqt", "dynamic")


def recipe_of(rng: random.Random, target: str, program: Program) -> qjax.Recipe:
    """Half of them W8A8 or near it, as the target's runtime has it; the others anything that a recipe can say."""
    if target == "fpga":
        return qjax.Recipe(
            target=target,
            weights=QSpec(bits=rng.randint(2, 16)),
            activations=QSpec(bits=rng.randint(3, 12)),
            method="tqt",
            weight_method="tqt",
        )
    unsigned = target.startswith(("torch", "onnx")) or rng.random() < 0.15
    if rng.random() < 0.5:
        return qjax.Recipe(
            target=target,
            weights=QSpec(bits=8, axis=rng.choice([-1, -1, None])),
            activations=QSpec(bits=8, signed=not unsigned, symmetric=False),
            first_last_bits=rng.choice([None, None, 8]),
            reduce_range=rng.random() < 0.2,
        )
    granularity: dict[str, Any] = rng.choice(
        [*[{"axis": -1}] * 5, *[{"axis": None}] * 3, {"axis": -1, "group_size": 2, "group_axis": 0}]
    )
    method, weight_method = rng.choice(METHODS), rng.choice(WEIGHT_METHODS)
    symmetric = method == "tqt" or (not unsigned and method != "pact" and rng.random() < 0.3)
    return qjax.Recipe(
        target=target,
        weights=QSpec(bits=rng.randint(2, 16), symmetric=weight_method == "tqt" or rng.random() < 0.9, **granularity),
        activations=QSpec(bits=rng.randint(2, 16), signed=not unsigned, symmetric=symmetric),
        overrides=_overrides(rng, program),
        first_last_bits=rng.choice([None, None, None, rng.randint(2, 16)]),
        output_bits=rng.choice([8, 8, rng.randint(2, 16)]),
        method=method,
        weight_method=weight_method,
        observer=rng.choice(["auto", "auto", "minmax", "moving_average", "percentile", "mse", "entropy"]),
        weight_observer=rng.choice(["auto", "auto", "minmax", "mse", "lsq"]),
        reduce_range=rng.random() < 0.1,
    )


EIGHT = qjax.Dynamic(weights=QSpec(bits=8, axis=-1), activations=QSpec(bits=8))


def _overrides(rng: random.Random, program: Program) -> dict[str | type, Any]:
    layers = sorted({step.layer for step in program.steps if step.kind in ("dense", "conv", "einsum", "batch_norm")})
    if not layers or rng.random() < 0.6:
        return {}
    choices: list[Any] = [QSpec(bits=rng.randint(2, 16), axis=-1), qjax.FLOAT, EIGHT]
    choices.append(qjax.Override(activations=QSpec(bits=rng.randint(2, 16), symmetric=False)))
    return {rng.choice(layers): rng.choice(choices)}
