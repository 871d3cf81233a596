"""The proof and the training of `experiments.rollout`, in little: a sampler and a trainer agree in every bit."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.rollout import layouts, proof, training

ints = functools.partial(np.array, dtype=np.int32)
TINY = dataclasses.replace(proof.SMALL, length=5, texts=6, slots=2, alone=2)


def test_layouts_hold_every_token_once():
    texts = layouts.Texts(np.arange(20, dtype=np.int32).reshape(4, 5), ints([5, 3, 4, 2]))
    for layout in (
        layouts.laid_out(texts, 5),
        layouts.laid_out(texts, 10, 2),
        layouts.laid_out(texts, 10),
        layouts.laid_out(texts, 10, shift=5),
    ):
        inside = layout.owner >= 0
        assert sorted(layout.tokens[inside]) == sorted(texts.tokens[np.arange(5)[None] < texts.lengths[:, None]])
        np.testing.assert_array_equal(
            texts.tokens[layout.owner[inside], layout.positions[inside]], layout.tokens[inside]
        )
        # a token sees its own text up to itself
        assert (layout.seen.sum(-1)[inside] == layout.positions[inside] + 1).all()


@pytest.mark.parametrize(("slots", "delay"), [(1, 0), (2, 0), (3, 2)])
def test_a_schedule_reads_every_text_in_one_slot(slots, delay):
    lengths = ints([5, 3, 4, 2, 5])
    plan = layouts.schedule(layouts.Texts(np.zeros((5, 5), np.int32), lengths), slots, delay)
    assert plan.text.shape[1] == slots
    read = [(int(t), int(i)) for t, i in zip(plan.text.T.ravel(), plan.index.T.ravel(), strict=True) if t < 5]
    assert sorted(read) == [(t, i) for t, length in enumerate(lengths) for i in range(length - 1)]
    for text in range(5):
        steps, slot = np.nonzero(plan.text == text)
        assert len(set(slot)) == 1
        assert (np.diff(steps) == 1).all()
        np.testing.assert_array_equal(plan.index[steps, slot], np.arange(len(steps)))


@pytest.mark.slow
def test_the_sampler_and_the_trainer_agree():
    """Whole texts beside two slots that are refilled, as the tokens were drawn, and one slot that reads some again."""
    model = proof.trained(TINY)
    side = proof.side_of("exact", model, proof.calibrated(model, TINY), TINY, longer=False)
    texts, drawn = proof.drawn(side, TINY)
    _, whole = next(proof.trainer_forms(side, texts, TINY, longer=False))
    _, alone = proof.slots(side, texts, TINY, 1)
    for name, found in {"drawn": drawn, "alone": alone}.items():
        row = proof.compared("exact", name, found, whole, texts, TINY.prompt)
        assert row.differ == 0, row
        assert row.tokens > 5


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.compiled
def test_every_form_agrees_and_floats_do_not():
    rows = list(proof.rows(proof.SMALL, ("exact", "float32")))
    assert len(rows) == 20
    assert not [row for row in rows if row.kind == "exact" and row.differ]
    assert sum(row.differ for row in rows if row.kind == "float32") > 0
    assert proof.table(rows).count("\n") == len({row.form for row in rows}) + 1


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.compiled
def test_importance_ratios_are_one_on_policy(tmp_path):
    setting = dataclasses.replace(training.Setting(), layers=1, questions=2, answers=2, updates=3, before=2)
    kinds = ("exact", "float, int8 sampler, corrected")
    rows = training.rows(setting, 1, tmp_path / "rows.jsonl", kinds)
    exact, patched = ([row for row in rows if row.kind == kind] for kind in kinds)
    assert [(row.differ, row.ratio) for row in exact] == [(0, 1.0)] * 3
    assert sum(row.differ for row in patched) > 0
    # a second run reads the rows and makes none
    assert training.rows(setting, 1, tmp_path / "rows.jsonl", kinds) == rows
    assert training.table(rows, every=3).count("\n") == 3
