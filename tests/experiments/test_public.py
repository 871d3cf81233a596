"""Models of transformers as they stand: integers only, for two sizes of the batch.

`python -m experiments.public` runs all of them, and flax's examples, and compares with the exact forward as well.
"""

from pathlib import Path

import jax
import pytest

from experiments.public import hub, keras_models, page
from experiments.public.__main__ import parser, sources
from experiments.public.row import Row, run

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package, on its import

EACH_TIME = {"BERT", "GPT-2", "Llama", "T5", "ViT"}
MODELS = [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.exhaustive) for name in hub.source()]


@pytest.fixture(autouse=True)
def users_promotion():
    """The models are written as users write them, under JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
@pytest.mark.exhaustive
def test_a_model_of_transformers(name: str) -> None:
    each_time = name in EACH_TIME
    row = run(name, hub.source(layers=1 if each_time else 2)[name], exact=False, codes=not each_time)
    assert row.error == ""
    assert (row.float_nodes, row.exact_mismatches) == (0, 0)
    assert row.differ <= row.compared / 1000
    assert row.cosine > 0.95


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "keras MobileNet",
        "keras.io mixer",
        "keras.io text",
        "keras.io time series",
        "keras.io vision transformer",
        "keras.io audio",
    ],
)
def test_a_model_of_keras(name: str) -> None:
    row = run(name, keras_models.source()[name], exact=False)
    assert row.error == ""
    assert (row.float_nodes, row.exact_mismatches) == (0, 0)
    assert row.differ <= row.compared / 1000
    assert row.cosine > 0.9


def test_the_collections(tmp_path: Path) -> None:
    found, missing = sources({})
    assert len(found["transformers"]) == 35
    assert missing[0] == "Flax's examples: no --examples FOLDER"
    if "google-tunix" not in found:
        assert missing[1].startswith("google-tunix: no tunix: pip install --no-deps google-tunix")
    assert len(sources({"examples": Path("examples")}, ["examples"])[0]["Flax's examples"]) == 21
    with pytest.raises(FileNotFoundError, match="--scenic takes a checkout"):
        sources({"scenic": tmp_path}, ["scenic"])
    (tmp_path / "scenic" / "projects").mkdir(parents=True)
    assert len(sources({"scenic": tmp_path}, ["scenic"])[0]["google-research/scenic"]) == 37
    found, missing = sources({}, ["maxtext", "flaxdiff"])
    for title, count in (("MaxText", 19), ("FlaxDiff", 7)):
        if title in found:
            assert len(found[title]) == count
        else:
            assert any(line.startswith(f"{title}: no {title.lower()}: pip install") for line in missing)


def test_a_failing_model_is_a_row() -> None:
    def broken():
        raise ValueError("first line\nsecond line")

    row = run("broken", broken)
    assert row.error == "build: ValueError: first line"
    text = page.page({"transformers": [Row("whole", nodes=3, exact=True), row]}, [], parser().parse_args([]))
    assert "1 of 2 convert; 0 outputs differ." in text
    assert "- **broken**, build: ValueError: first line" in text
