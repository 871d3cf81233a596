"""The experiment with a larger decoder, at two million parameters."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import scale

SIZES = {"vocabulary": 512, "width": 192, "layers": 4, "length": 16}


@pytest.mark.parametrize("form", scale.FORMS)
def test_a_model_reads_every_tensor_of_its_files(tmp_path: Path, form: str) -> None:
    sizes = {"vocabulary": 32, "width": 8, "layers": 2, "length": 4}
    scale.write(tmp_path, sizes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "rest.safetensors"]
    found = {
        "/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(scale.read(tmp_path, form, sizes)))
    }
    wanted = dict(scale.tensors(None, sizes))
    for layer in range(sizes["layers"]):
        for name, array in scale.tensors(layer, sizes).items():
            wanted[f"blocks/{layer}/{name}"] = array
    if form == "scan":
        names = [name for name in found if name.startswith("blocks/")]
        for name in names:
            stack = found.pop(name)
            found |= {name.replace("/", f"/{layer}/", 1): stack[layer] for layer in range(sizes["layers"])}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    sizes = {"vocabulary": 32, "width": 8, "layers": 1, "length": 4}
    scale.write(tmp_path, sizes)
    with pytest.raises(ValueError, match=r"expected shape \(6, 8\), got \(4, 8\)"):
        scale.read(tmp_path, "plain", {**sizes, "length": 6})


@pytest.mark.exhaustive
def test_both_forms_become_the_same_integers() -> None:
    options = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain, scan = (scale.main([*options, "--batches", "2", "--form", form]) for form in scale.FORMS)
    assert plain.parameters == scan.parameters == 1_980_032
    assert plain.nodes == scan.nodes
    assert plain.cosine == scan.cosine > 0.99
    names = ["import", "read", "float forward", "quantize", "calibrate", "gptq", "convert", "save", "run"]
    for result in (plain, scan):
        assert [stage.name for stage in result.stages] == names
        sizes = [stage.gib for stage in result.stages]
        assert sizes == sorted(sizes)
        assert sizes[-1] < 8
