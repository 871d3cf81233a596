"""Whole models as C: files, self-test, memory, errors."""

import ctypes
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from experiments.models import MLP, ResNet
from qjax.export.emit import c
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.retarget import retarget
from tests.export.emit import c_build
from tests.export.graphs import quantization


class Branches(nnx.Module):
    """Concatenation, max pool, depthwise, a product, a flip, two outputs."""

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.stem = nnx.Conv(2, 6, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.depthwise = nnx.Conv(6, 6, (3, 3), feature_group_count=6, rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        gate = x * jnp.flip(x, 1)
        x = jnp.concatenate([self.depthwise(x), gate + x], axis=-1)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.mean(axis=(1, 2))
        return self.head(x), x


UNSIGNED = qjax.QSpec(bits=8, signed=False, symmetric=False)
RECIPES = {
    "mlp": (lambda: MLP((20, 12), rngs=nnx.Rngs(0)), qjax.Recipe(target="tflite_micro"), (8, 8, 1)),
    "resnet": (
        lambda: ResNet(4, rngs=nnx.Rngs(0)),
        qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), activations=qjax.QSpec(bits=4, symmetric=False)),
        (8, 8, 1),
    ),
    "wide": (
        lambda: MLP((12,), rngs=nnx.Rngs(0)),
        qjax.Recipe(target="tflite_micro", activations=qjax.QSpec(bits=16)),
        (8, 8, 1),
    ),
    "pairs": (Branches, qjax.Recipe(target="torch_fbgemm_avx2", activations=UNSIGNED), (6, 6, 2)),
    "xnnpack": (Branches, qjax.Recipe(target="tflite_xnnpack"), (6, 6, 2)),
}


@pytest.fixture(scope="module")
def graphs():
    made: dict[str, qjax.IntegerGraph] = {}
    for name, (model, recipe, shape) in RECIPES.items():
        x = jax.random.normal(jax.random.key(0), (8, *shape))
        # flax's average pool counts in integers
        with jax.numpy_dtype_promotion("standard"):
            qmodel = qjax.quantize(model(), recipe, x)
            qmodel.eval()
            made[name] = qjax.convert(qmodel, x)
    made["arm"] = qjax.IntegerGraph(retarget(made["xnnpack"].ir, "tflite_optimized_arm"))
    return made


def codes_of(graph: Graph, batch: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        assert tensor.quantization is not None
        shape = [batch if n is None else n for n in tensor.shape]
        low, high = tensor.quantization.qmin, tensor.quantization.qmax
        inner = rng.integers(low, high + 1, shape)
        found.append(np.where(rng.random(shape) < 0.2, rng.choice([low, high], shape), inner).astype(tensor.dtype))
    return found


def test_whole_models_equal_the_interpreter(graphs, tmp_path):
    """Models of one batch in one library."""
    for batch, names in ((1, graphs), (3, ("arm", "pairs"))):
        folder = tmp_path / str(batch)
        folder.mkdir()
        built, text = c_build.programs({name: graphs[name].ir for name in names}, batch)
        library = ctypes.CDLL(str(c_build.compiled(text, folder, "-O2")))
        for name, program in built.items():
            x = codes_of(program.graph, batch)
            expected = graphs[name].interpreter(*x)
            for got, want in zip(c_build.call(library, program, name, x), expected, strict=True):
                assert np.array_equal(got, want), (name, batch)
            # memory: the plan is minimal for all of these
            assert program.plan.size == program.plan.bound, name


def test_files_pass_their_own_test_which_finds_a_changed_code(graphs, tmp_path, capsys):
    c.emit(graphs["mlp"].ir, tmp_path / "out", name="net", batch=2, vectors=3)
    files = c.to_files(graphs["mlp"].ir, name="net", batch=2, vectors=3)
    size = re.search(r"#define NET_ARENA_SIZE (\d+)\n", files["net.h"])
    assert size is not None
    assert f"arena of {size[1]} bytes" in capsys.readouterr().out
    folder = tmp_path / "out"
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    done = subprocess.run(["make", "-s", "test"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "net: 0 of 60 codes differ" in done.stdout
    # one golden code is changed
    text = files["net_test.c"]
    at = text.index("{", text.index("y_2[")) + 1
    value = text[at:].split(",")[0].strip()
    changed = text[:at] + text[at:].replace(value, str((int(value) + 129) % 256 - 128), 1)
    assert changed != text
    (folder / "net_test.c").write_text(changed)
    done = subprocess.run(["make", "-s", "test"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "vector 2, y[0]" in done.stdout
    assert "net: 1 of 60 codes differ" in done.stdout


def test_sanitizers_and_every_level_of_optimization(graphs, tmp_path):
    names = ("resnet", "pairs")
    built, text = c_build.programs({name: graphs[name].ir for name in names})
    inputs = {name: codes_of(graphs[name].ir, 1, seed=4) for name in names}
    for flags in (c_build.SANITIZERS, ["-O0"]):
        found = c_build.run_program(built, text, tmp_path, inputs, flags)
        for name in names:
            for got, want in zip(found[name], graphs[name].interpreter(*inputs[name]), strict=True):
                assert np.array_equal(got, want), name


def test_the_text_is_deterministic_and_says_what_it_is(graphs):
    files = c.to_files(graphs["resnet"].ir, vectors=0)
    assert files == c.to_files(graphs["resnet"].ir, vectors=0)
    text, header = files["model.c"], files["model.h"]
    assert set(files) == {"model.c", "model.h", "model_test.c", "Makefile"}
    # the rule in its own words, and the place of the user's code
    assert "The rule nearest_even." in text
    assert "models.py:" in text
    assert "SCALE_MANTISSA" in header
    assert "0x1." in header
    code = "".join(part.split("*/")[-1] for part in (text + header).split("/*"))
    assert not {"float", "double"} & set(code.replace("(", " ").split())


def test_scales_in_the_header_are_exact(graphs):
    graph = graphs["mlp"].ir
    lines = c.to_files(graph, vectors=0)["model.h"].split("\n")
    defined = [line.split() for line in lines if line.startswith("#define MODEL_")]
    known = {words[1]: words[2].strip("()") for words in defined if len(words) == 3}
    for parameter, name in (("X", graph.inputs[0]), ("Y", graph.outputs[0])):
        quantization_ = graph.tensors[name].quantization
        assert quantization_ is not None
        scale = int(known[f"MODEL_{parameter}_SCALE_MANTISSA"]) * 2.0 ** int(known[f"MODEL_{parameter}_SCALE_EXPONENT"])
        assert np.float32(scale) == quantization_.scale
        assert int(known[f"MODEL_{parameter}_ZERO_POINT"]) == quantization_.zero_point


def hostile() -> Graph:
    """Names that would end a comment, continue a line or be no identifiers; outputs that are inputs, twice."""
    codes = quantization(zero_point=-3)
    bad = 'a */ int "\\\n??/ é'
    tensors = [Tensor("x", (None, 2, 2), "int8", codes), Tensor(bad, (None, 4), "int8", codes)]
    node = Node(bad, "reshape", ("x",), bad, {}, {"shape": [None, 4]}, "while.py:1 */")
    return Graph({t.name: t for t in tensors}, (node,), ("x",), (bad, "x", bad), "nearest_even")


def test_names_cannot_leave_their_comments_and_outputs_may_be_inputs(tmp_path):
    built, text = c_build.programs({"m": hostile()})
    x = np.array([[[1, -128], [127, 0]]], np.int8)
    library = ctypes.CDLL(str(c_build.compiled(text, tmp_path)))
    for got in c_build.call(library, built["m"], "m", [x]):
        assert np.array_equal(got.reshape(-1), x.reshape(-1))
    assert built["m"].plan.size == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a-b"}, "expected a name of ASCII letters, digits and underscores, got 'a-b'"),
        ({"name": "1x"}, "expected a name"),
        ({"batch": 0}, "expected a batch of at least 1, got 0"),
        ({"vectors": -1}, "expected at least 0 vectors, got -1"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        c.to_files(hostile(), **options)
