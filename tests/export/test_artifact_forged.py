"""Files that somebody edited and signed again: they are refused, or what they hold runs and stays within its memory."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.export.artifact import ArtifactError, GraphError, from_bytes, to_bytes
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.program import build as build_c
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Tensor
from tests.export.emit.c_build import SANITIZERS, Compiled
from tests.export.emit.nodes import of_operations
from tests.export.forged import fed, forged
from tests.export.sealed import build, parts

BATCH = 2


class Dense(nnx.Module):
    """Two products and a strided slice."""

    def __init__(self) -> None:
        self.a, self.b = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.a(x)))[:, ::2]


class Image(nnx.Module):
    """Convolutions, one of them depthwise, a residual, a pool, a mean."""

    def __init__(self) -> None:
        self.a = nnx.Conv(2, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))
        self.b = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.a(x))
        return jnp.mean(nnx.max_pool(y + self.b(y), (2, 2), (1, 1)), (1, 2))


class Attention(nnx.Module):
    """A layer norm, products of activations, softmax and a table."""

    def __init__(self) -> None:
        self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        self.attend = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.gelu(self.attend(self.norm(x)))


class Recurrent(nnx.Module):
    """A scan."""

    def __init__(self) -> None:
        self.cell = nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(self.cell(jnp.concatenate([v, h], -1)))
            return h, h

        return jax.lax.scan(step, jnp.zeros((x.shape[0], 3)), jnp.swapaxes(x, 0, 1))[1]


class Stateful(nnx.Module):
    """A state that the call returns."""

    def __init__(self) -> None:
        self.cell = nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(self.cell(jnp.concatenate([x, h], -1)))
        return h * 2, h


class Lookup(nnx.Module):
    """Rows that integers choose, and the places of the greatest numbers."""

    def __init__(self) -> None:
        self.table = nnx.Embed(7, 4, rngs=nnx.Rngs(0))

    def __call__(self, index: jax.Array) -> jax.Array:
        return jnp.argmax(jnp.exp(self.table(index)), -1)


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


NETWORKS = {
    "dense": (Dense, _normal(3, 4), {}),
    "image": (Image, _normal(2, 6, 6, 2), {}),
    "attention": (Attention, _normal(2, 3, 4), {}),
    "recurrent": (Recurrent, _normal(2, 3, 2), {}),
    "state": (Stateful, (_normal(2, 2), _normal(2, 3)), {"state": (1, 1)}),
    "lookup": (Lookup, jnp.zeros((2, 3), jnp.int32), {}),
}


def network(name: str) -> bytes:
    """The file of a network, in which its quantized graph is too."""
    model, sample, options = NETWORKS[name]
    qmodel = qjax.quantize(model(), qjax.Recipe(), sample)
    qjax.calibrate(qmodel, [sample])
    qmodel.eval()
    return to_bytes(qjax.convert(qmodel, sample, **options).ir)


def loaded(file: bytes) -> Graph | None:
    """The graph of a file that is accepted, after it was traced and written as C; raises what no user should see."""
    try:
        graph = from_bytes(file)
    except (ArtifactError, GraphError):
        return None
    try:
        IntegerGraph(graph).jaxpr(BATCH)
        build_c(graph, BATCH, Source())
    except ValueError as error:
        # as of a slice that begins at the thousandth example
        if "hoose another batch" in str(error):
            return None
        raise
    return graph


def check(files: dict[str, bytes], seeds: range, folder: pathlib.Path) -> int:
    """Each edit of the files in turn, through C under the address sanitizer; how many edited files were accepted."""
    names, accepted = sorted(files), {}
    for seed in seeds:
        name = names[seed % len(names)]
        file, said = forged(files[name], seed)
        try:
            graph = None if file == files[name] else loaded(file)
        except Exception as error:
            raise AssertionError(f"edit {seed} of {name} ({said}) raises {type(error).__name__}: {error}") from error
        if graph is not None:
            # the functions of a state need the header, which a file of many models does not have
            accepted[f"{name}_{seed}"] = graph.replace(metadata={}), fed(graph, BATCH, seed)
    compiled = Compiled(accepted, folder, BATCH)
    found = compiled.run(*SANITIZERS, "-w")
    compiled.assert_equal(found)
    for name, codes in found.items():
        graph = compiled.graphs[name]
        for output, array in zip(graph.outputs, codes, strict=True):
            q = graph.tensors[output].quantization
            assert q is None or not array.size or q.qmin <= array.min() <= array.max() <= q.qmax, name
    return len(accepted)


def test_forged_files_are_refused_or_stay_within_their_memory(tmp_path: pathlib.Path) -> None:
    chosen = ("slice", "table", "conv0_2_4", "take_wraps", "softmax_zero", "embed_rows", "select_rows")
    files = {name: to_bytes(of_operations()[name][0]) for name in chosen}
    assert 0 < check(files, range(140), tmp_path) < 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(0, 1400, 200))
def test_forged_files_of_every_operation(start: int, tmp_path: pathlib.Path) -> None:
    files = {name: to_bytes(graph) for name, (graph, _) in of_operations().items()}
    assert 0 < check(files, range(start, start + 200), tmp_path) < 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
def test_forged_files_of_networks(name: str, tmp_path: pathlib.Path) -> None:
    assert 0 < check({name: network(name)}, range(100), tmp_path) < 50


def drop(key: str):
    """Every node without a constant or an attribute."""

    def edit(document):
        for node in document["nodes"]:
            node["constants"].pop(key, None)
            node["attributes"].pop(key, None)

    return edit


def put(*path, to):
    def edit(document):
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return edit


LIES = {
    "an output that is empty": (put("tensors", -1, "shape", to=[0, 3]), r"to have the shape \(0, 3\)"),
    "an output that is smaller": (put("tensors", -1, "shape", to=[None, 1]), r"to have the shape \(None, 1\)"),
    "an output of one example": (put("tensors", -1, "shape", to=[2, 2]), r"to have the shape \(2, 2\)"),
    "an output of another type": (put("tensors", -1, "dtype", to="int16"), "expected its output to be of int16"),
    "a range that moved codes leave": (
        put("tensors", -1, "quantization", "qmin", to=-100),
        "codes within the range of its output",
    ),
    "no multiplier": (drop("multiplier"), "its fields contradict each other"),
    "no rule": (drop("rule"), "its fields contradict each other"),
    "no strides": (drop("strides"), "lacks the attribute 'strides'"),
    "strides of 0": (put("nodes", -1, "attributes", "strides", to=[1, 0]), "its fields contradict each other"),
    "a start below 0": (put("nodes", -1, "attributes", "start", to=[0, -1]), "list of integer from 0 on"),
    "a stride too few": (put("nodes", -1, "attributes", "strides", to=[1]), "its fields contradict each other"),
    "bits for the sums that are none": (
        put("nodes", 0, "attributes", "accumulator", to=[["bits", "x"]]),
        "its fields contradict each other",
    ),
    "an argument twice": (put("metadata", "input_structure", to=["tuple", [0, 0]]), "expected the positions of 1"),
    "a result that is not there": (put("metadata", "output_structure", to=1), "expected the positions of 1 arrays"),
    "a state that is not there": (put("metadata", "state", to=[3, 0]), "fields contradict each other"),
    "ranges of integers in words": (put("metadata", "integers", to="all"), "expected the range of each input"),
}


@pytest.fixture(scope="module")
def dense() -> bytes:
    return network("dense")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("lie", LIES)
def test_lies_about_a_network(lie: str, dense: bytes) -> None:
    edit, message = LIES[lie]
    document, arrays, data = parts(dense)
    edit(document)
    with pytest.raises(GraphError, match=message):
        from_bytes(build(document, arrays, data))


def test_a_table_holds_codes_of_its_result() -> None:
    file = to_bytes(of_operations()["table"][0])
    document, arrays, data = parts(file)
    next(t for t in document["tensors"] if t["name"] == "y")["quantization"]["qmax"] = 3
    with pytest.raises(GraphError, match=r"constant 'table' to hold codes within \[-128, 3\]"):
        from_bytes(build(document, arrays, data))


def test_sums_that_overflow_are_refused(dense: bytes) -> None:
    document, arrays, data = parts(dense)
    begin, end = arrays["value:a/bias"]["data_offsets"]
    biases = np.full((end - begin) // 4, 2**31 - 1, "<i4").tobytes()
    with pytest.raises(GraphError, match="beyond int32"):
        from_bytes(build(document, arrays, data[:begin] + biases + data[end:]))


def test_a_batch_that_a_slice_does_not_reach_is_refused_by_name():
    """The graph takes a batch of 256 and more, so it loads; a smaller one is an error of the node."""
    tensors = {name: Tensor(name, (None, 3), "int32") for name in ("x", "y")}
    cut = {"start": [255, 0], "limit": [None, 3], "strides": [1, 1]}
    graph = IntegerGraph(Graph(tensors, (Node("cut", "slice", ("x",), "y", {}, cut),), ("x",), ("y",), "nearest_even"))
    assert graph.jaxpr(256).out_avals[0].shape == (1, 3)
    with pytest.raises(ValueError, match=r"Node 'cut' \(slice\).*\(2, 3\).*choose another batch"):
        graph.jaxpr(2)
