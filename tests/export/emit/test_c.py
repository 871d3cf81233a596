"""Whole models as C: files, self-test, memory, errors."""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import targets
from qjax.assign.retarget import retarget
from qjax.export import Backend, Fusion, op, tensor
from qjax.export.emit import c
from qjax.graph.ir import Graph, Node, Tensor
from tests.export.emit import c_build, nodes
from tests.export.graphs import quantization
from tests.lower.lowered import residual_network


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


# kernels of 3x3x2 to 6 channels, 3x3 for each of 6, 12 to 5: codes of a byte, of half a byte
WEIGHT_BYTES = {"wide": 108 + 54 + 60, "w4": 6 * 9 + 27 + 30}
UNSIGNED = qjax.QSpec(bits=8, signed=False, symmetric=False)
RECIPES = {
    "w4": qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1), activations=qjax.QSpec(bits=4, symmetric=False)),
    "wide": qjax.Recipe(target="tflite_micro", activations=qjax.QSpec(bits=16)),
    "pairs": qjax.Recipe(target="torch_fbgemm_avx2", activations=UNSIGNED),
    "xnnpack": qjax.Recipe(target="tflite_xnnpack"),
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    made: dict[str, Graph] = {}
    x = jax.random.normal(jax.random.key(0), (4, 6, 6, 2))
    for name, recipe in RECIPES.items():
        # flax's average pool counts in integers
        with jax.numpy_dtype_promotion("standard"):
            qmodel = qjax.quantize(Branches(), recipe, x)
            qmodel.eval()
            made[name] = qjax.convert(qmodel, x).ir
    made["arm"] = retarget(made["xnnpack"], "tflite_optimized_arm")
    # a residual sum, codes of 8 and of 16 bits
    made["residual"] = nodes.finished(residual_network(), "tflite_micro")
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


@pytest.fixture(scope="module")
def models(graphs, tmp_path_factory):
    """Whole models in one file."""
    named = {name: (graph, codes_of(graph, 1)) for name, graph in graphs.items()}
    return c_build.Compiled(named, tmp_path_factory.mktemp("models"))


@pytest.mark.sampled(1)
def test_whole_models_equal_the_interpreter(models):
    """With all that a compiler may conclude from types; the stack is what the header says and little more."""
    models.assert_equal(models.called(*c_build.FASTEST, "-fstack-usage"))
    (usage,) = models.folder.glob("*.su")
    frames = [line.split("\t") for line in usage.read_text().splitlines()]
    stated = {name: program.stack for name, program in models.programs.items()}
    for place, size, kind in frames:
        function = place.split(":")[-1]
        known = max(stated[name] for name in stated if function.startswith(f"{name}_"))
        assert int(size) <= known + 600, place
        assert kind == "static"


def test_whole_models_under_sanitizers(models):
    models.assert_equal(models.run(*c_build.SANITIZERS))


def test_the_arena_is_as_small_as_can_be(models):
    for name, program in models.programs.items():
        assert program.plan.size == program.plan.bound, name


def test_a_batch(graphs, tmp_path):
    compiled = c_build.Compiled({"residual": (graphs["residual"], codes_of(graphs["residual"], 3))}, tmp_path, 3)
    compiled.assert_equal(compiled.called())


def lost_bit(inputs, node):
    """A convolution whose last bit is lost on its way to the addition."""
    x, residual = inputs
    return node["add"].run(node["conv"].run(x) & jnp.uint8(254), residual)


def saturating(inputs, node):
    """A dense layer whose register of 14 bits saturates after every product."""
    dense = node["dot"]
    centred = inputs[0].astype(jnp.int32) - dense.constants["zero_point0"]
    kernel = jnp.asarray(dense.constants["kernel"]).astype(jnp.int32)

    def cycle(acc, operands):
        x, w = operands
        return jnp.clip(acc + x[:, None] * w[None, :], -(2**13), 2**13 - 1), None

    start = jnp.zeros((centred.shape[0], kernel.shape[1]), jnp.int32)
    total = lax.scan(cycle, start, (centred.T, kernel))[0] + dense.constants["bias"][None, :]
    return jnp.clip((total >> 2) + node.zero_point, node.qmin, node.qmax).astype(node.dtype)


def test_the_kernels_of_a_vendors_backend_are_emitted_like_any_other(tmp_path):
    graph = nodes.finished(residual_network(), "tosa").replace(quantization=targets.get("tosa").quantize)
    whole = op("add", op("conv", tensor("x"), name="conv", relu=True), tensor("r"), name="add")
    patterns = [Fusion("lost_bit", whole, lost_bit), Fusion("saturating", op("dot"), saturating)]
    fused = Backend("c_chip", "tosa", patterns).partition(graph)
    assert [node.op for node in fused.nodes].count("backend") == 2
    compiled = c_build.Compiled({"m": (fused, codes_of(graph, 2))}, tmp_path, 2)
    compiled.assert_equal(compiled.called())


@pytest.mark.exhaustive
def test_files_pass_their_own_test_which_finds_a_changed_code(graphs, tmp_path, capsys):
    c.emit(graphs["residual"], tmp_path / "out", name="net", batch=2, vectors=3)
    files = c.to_files(graphs["residual"], name="net", batch=2, vectors=3)
    size = re.search(r"#define NET_ARENA_SIZE (\d+)\n", files["net.h"])
    assert size is not None
    assert f"arena of {size[1]} bytes" in capsys.readouterr().out
    folder = tmp_path / "out"
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    done = subprocess.run(["make", "-s", "test"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "net: 0 of 42 codes differ" in done.stdout
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
    assert "net: 1 of 42 codes differ" in done.stdout


def test_the_text_is_deterministic_and_says_what_it_is(graphs):
    files = c.to_files(graphs["w4"], vectors=0)
    assert files == c.to_files(graphs["w4"], vectors=0)
    text, header = files["model.c"], files["model.h"]
    assert set(files) == {"model.c", "model.h", "model_test.c", "Makefile"}
    # what the rule computes, and the place of the user's code
    assert "The rule nearest_even: one rounding" in text
    assert "test_c.py:" in text
    assert "SCALE_MANTISSA" in header
    assert "0x1." in header
    code = "".join(part.split("*/")[-1] for part in (text + header).split("/*"))
    assert not {"float", "double"} & set(code.replace("(", " ").split())


def test_scales_in_the_header_are_exact(graphs):
    graph = graphs["wide"]
    lines = c.to_files(graph, vectors=0)["model.h"].split("\n")
    defined = [line.split() for line in lines if line.startswith("#define MODEL_")]
    known = {words[1]: words[2].strip("()") for words in defined if len(words) == 3}
    for parameter, name in (("X", graph.inputs[0]), ("Y0", graph.outputs[0])):
        quantization_ = graph.tensors[name].quantization
        assert quantization_ is not None
        scale = int(known[f"MODEL_{parameter}_SCALE_MANTISSA"]) * 2.0 ** int(known[f"MODEL_{parameter}_SCALE_EXPONENT"])
        assert np.float32(scale) == quantization_.scale
        assert int(known[f"MODEL_{parameter}_ZERO_POINT"]) == quantization_.zero_point


def test_the_header_is_cxx_too_and_states_the_memory(graphs, tmp_path):
    """Weights of 4 bits are stored two to a byte."""
    for name in ("w4", "wide"):
        text = c.to_files(graphs[name], name=name, vectors=0)[f"{name}.h"]
        (tmp_path / f"{name}.h").write_text(text)
        known = dict(re.findall(r"#define (\w+) (\d+)\n", text))
        weights = re.search(r"constants take (\d+) bytes, of these weights (\d+)", text.replace("\n *", ""))
        assert weights is not None
        assert int(weights[2]) == WEIGHT_BYTES[name]
        assert int(known[f"{name.upper()}_STACK_SIZE"]) > 0
        length, align = int(known[f"{name.upper()}_ARENA_LENGTH"]), int(known[f"{name.upper()}_ARENA_ALIGN"])
        assert length * align == int(known[f"{name.upper()}_ARENA_SIZE"])
    heads = "".join(f'#include "{name}.h"\n' for name in ("w4", "wide"))
    arenas = "static w4_arena a[W4_ARENA_LENGTH];\nstatic wide_arena b[WIDE_ARENA_LENGTH];\n"
    calls = "int main() { w4_run(0, 0, 0, a); wide_run(0, 0, 0, b); }\n"
    (tmp_path / "main.cpp").write_text(heads + arenas + calls)
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x", "c++"]
    done = subprocess.run(["gcc", *flags, str(tmp_path / "main.cpp")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def hostile() -> Graph:
    """Names that would end a comment, continue a line or be no identifiers; outputs that are inputs, twice."""
    codes = quantization(zero_point=-3)
    bad = 'a */ int "\\\n??/ é'
    tensors = [Tensor("x", (None, 2, 2), "int8", codes), Tensor(bad, (None, 4), "int8", codes)]
    node = Node(bad, "reshape", ("x",), bad, {}, {"shape": [None, 4]}, "while.py:1 */")
    return Graph({t.name: t for t in tensors}, (node,), ("x",), (bad, "x", bad), "nearest_even")


def test_names_cannot_leave_their_comments_and_outputs_may_be_inputs(tmp_path):
    x = np.array([[[1, -128], [127, 0]]], np.int8)
    compiled = c_build.Compiled({"m": (hostile(), [x])}, tmp_path)
    for got in compiled.called()["m"]:
        assert np.array_equal(got.reshape(-1), x.reshape(-1))
    assert compiled.programs["m"].plan.size == 0


@pytest.mark.exhaustive
def test_a_mask_of_the_program_that_hides_nothing(tmp_path):
    """As the attention mask of a whole text: a constant of booleans that are all the same."""

    class Masked(nnx.Module):
        def __call__(self, x):
            x, mask = x[:, :, None], jnp.ones(x.shape[:2], bool)
            return jax.nn.dot_product_attention(x, x, x, mask=mask[:, None, None, :])

    x = np.asarray(jax.random.normal(jax.random.key(0), (5, 6, 6)))
    qmodel = qjax.quantize(Masked(), qjax.Recipe(target="onnxruntime"), x)
    qjax.calibrate(qmodel, [x])
    graph = qjax.convert(qmodel, x)
    compiled = c_build.Compiled({"m": (graph.ir, [np.asarray(graph.quantize(x))])}, tmp_path, 5)
    compiled.assert_equal(compiled.called())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a-b"}, "expected a name of ASCII letters, digits and underscores, got 'a-b'"),
        ({"name": "1x"}, "expected a name"),
        ({"batch": 0}, "expected a batch of at least 1, a whole number such as batch=1, got 0"),
        ({"vectors": -1}, "expected at least 0 vectors, got -1"),
        ({"simd": "avx2"}, "expected simd=True .* 'cortex_m' .* or False. Got 'avx2'"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        c.to_files(hostile(), **options)


def gated(params, x, mask, steps):
    """An input of booleans, one of integers; a result of each, and one of codes."""
    return jnp.where(mask, x @ params["kernel"], -1.0), ~mask, steps + jnp.int32(1)


KERNEL = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32)


def test_inputs_and_results_of_every_type_pass_the_files_own_test(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    args = (x, x > 0, np.arange(3, dtype=np.int32))
    qmodel = qjax.quantize(qjax.from_function(gated, {"kernel": KERNEL}), qjax.Recipe(), args)
    graph = qjax.convert(qmodel, args)
    graph.emit("c", tmp_path, batch=3)
    done = subprocess.run(["make", "-C", tmp_path, "test"], capture_output=True, text=True, check=True)
    assert f"0 of {4 * (12 + 12 + 3)} codes differ" in done.stdout
    codes = [np.asarray(code) for code in graph.quantize(*args)]
    found, flags, steps = graph.native(3).run(*codes)
    assert flags.dtype == bool
    assert np.array_equal(flags, x <= 0)
    assert np.array_equal(steps, [1, 2, 3])
    assert np.array_equal(found, graph.run(*codes)[0])


def test_every_helper_is_used_and_no_path_of_this_machine_is_told(graphs):
    for name, simd in (("wide", False), ("wide", True), ("w4", "cortex_m"), ("pairs", True)):
        text = c.to_files(graphs[name], simd=simd)["model.c"]
        for helper in set(re.findall(r"^static inline [^\n(;]*?(\w+)\(", text, re.MULTILINE)):
            bodies = re.findall(
                rf"^static inline [^\n(;]*?\b{helper}\([^{{;]*\)\n\{{\n.*?^\}}", text, re.MULTILINE | re.DOTALL
            )
            inside = sum(len(re.findall(rf"\b{helper}\b", body)) for body in bodies)
            assert len(re.findall(rf"\b{helper}\b", text)) > inside, (name, simd, helper)
        assert "test_c.py:" in text
        assert not re.search(r"[ (]/\w+/", text)
