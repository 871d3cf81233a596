"""Valid checksums around what chance made of a graph: an error of our own, or a graph that saves and loads again."""

import copy
import json
import random

import pytest

from qjax import targets
from qjax.assign import assign
from qjax.export.artifact import to_bytes
from tests.export.sealed import FILE, SMALL, build, packed, parts, seal, survives
from tests.lower.lowered import dense_chain

VALUES = [
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    -(2**63),
    0.5,
    "",
    "x",
    "w",
    "int8",
    "int64",
    [],
    {},
    [0],
    [None],
]
VALUES += [["x"], {"a": 1}, "\u0000", "n" * 2000, [2**31 - 1] * 40, "packed 2 bits", [[[[]]]]]


def places(value, path=()):
    """The paths of every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutate(tree, rng: random.Random) -> None:
    """Replace, remove, copy or rename one random place."""
    path = rng.choice(list(places(tree)))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    action = rng.randrange(5)
    if action == 0:
        del parent[path[-1]]
    elif action == 1 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice(parent)))
    elif action == 2 and isinstance(parent, dict):
        parent[rng.choice(["x", "w", "", "name", "shape"])] = parent.pop(path[-1])
    elif action == 3 and type(parent[path[-1]]) is int:
        parent[path[-1]] += rng.choice([-1, 1, 7, 2**33])
    else:
        parent[path[-1]] = copy.deepcopy(rng.choice(VALUES))


TURNS = [120, pytest.param(400, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.sampled(3)
def test_mutated_structures_with_valid_checksums(seed, turns):
    rng = random.Random(seed)
    original = parts(FILE if seed % 4 == 0 else SMALL)
    loaded = 0
    for _ in range(turns):
        document, arrays, data = copy.deepcopy(original)
        mutate(document if rng.random() < 0.8 else arrays, rng)
        if rng.random() < 0.1:
            mutate(document, rng)
        loaded += survives(build(document, arrays, data))
    # Some mutations are harmless (an attribute, a location): both outcomes must have been seen.
    assert 0 < loaded < turns / 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.sampled(1)
def test_mutated_quantized_graphs_with_valid_checksums(seed, turns):
    """A network whose file shares scales and weights between its two stages, one of them with other signs."""
    rng = random.Random(seed)
    original = parts(to_bytes(assign(dense_chain(gamma=(1.5, -0.75, 2.0, 1.0)), targets.get("tflite_micro"))))
    assert any(entry.get("negated") for entry in original[0]["quantized"]["arrays"])
    loaded = 0
    for _ in range(turns):
        document, arrays, data = copy.deepcopy(original)
        mutate(document["quantized"], rng)
        loaded += survives(build(document, arrays, data))
    assert 0 < loaded < turns / 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
def test_mutated_text_and_data_with_valid_checksums(seed):
    rng = random.Random(seed)
    document, arrays, data = parts(SMALL)
    outcomes = set()
    for _ in range(1000):
        structure, header = bytearray(json.dumps(document).encode()), bytearray(json.dumps(arrays)[1:].encode())
        payload = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            target = rng.choice([structure, structure, header, payload])
            place = rng.randrange(len(target))
            action = rng.randrange(4)
            if action == 0:
                target[place] ^= 1 << rng.randrange(8)
            elif action == 1:
                target[place] = rng.choice(b'[]{}",:\\0-1.eNu')
            elif action == 2:
                del target[place : place + rng.randrange(1, 5)]
            else:
                target[place:place] = target[place : place + rng.randrange(1, 20)]
        text, entries = (bytes(part).decode("utf-8", "surrogateescape") for part in (structure, header))
        outcomes.add(survives(seal(json.dumps(packed(text)) + "}," + entries, bytes(payload))))
    assert outcomes == {True, False}
