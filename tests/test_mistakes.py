"""Usual mistakes: each error says what was expected, what came, and the cure."""

import dataclasses
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax import QSpec
from qjax.support.batches import Batches

X = np.asarray(np.random.default_rng(0).normal(size=(16, 6)), np.float32)
LABELS = np.arange(16) % 4


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.body(x))))


@functools.cache
def made() -> tuple[Any, Any, Any]:
    """(float model, quantized model, graph)."""
    model = Net(nnx.Rngs(0))
    qmodel = qjax.quantize(model, qjax.Recipe(), X)
    qmodel.eval()
    return model, qmodel, qjax.convert(qmodel, X)


# ---------------------------------------------------------------------------- three forms

Take = Callable[..., Any]

TAKE: dict[str, Take] = {
    "calibrate": lambda *given, **inputs: qjax.calibrate(made()[1], *given, **inputs),
    "verify": lambda *given, **inputs: qjax.verify(made()[2], made()[1], *given, **inputs),
    "compare": lambda *given, **inputs: qjax.compare(made()[2], made()[2], *given, **inputs),
    "accumulators": lambda *given, **inputs: qjax.accumulators(made()[2], *given, **inputs),
    "statistics": lambda *given, **inputs: qjax.statistics(made()[1], *given, **inputs),
    "sensitivity": lambda *given, **inputs: qjax.sensitivity(made()[1], *given, **inputs),
    "search": lambda *given, **inputs: qjax.search(
        made()[0], qjax.Recipe(), X, *given, budget=qjax.Budget(size=10_000), **inputs
    ),
    "rotate": lambda *given, **inputs: qjax.training.rotate(made()[1], *given, **inputs),
    "brecq": lambda *given, **inputs: qjax.training.brecq(made()[1], *given, **inputs),
    "adaround": lambda *given, **inputs: qjax.training.adaround(made()[1], *given, **inputs),
    "correct_bias": lambda *given, **inputs: qjax.training.correct_bias(made()[1], *given, **inputs),
    "reestimate_batch_norm": lambda *given, **inputs: qjax.training.reestimate_batch_norm(made()[1], *given, **inputs),
    "post_training": lambda *given, **inputs: qjax.post_training(made()[0], qjax.Recipe(), *given, **inputs),
    "report": lambda *given, **inputs: qjax.report(made()[1], *given, **inputs),
    "node_data": lambda *given, **inputs: qjax.node_data(made()[1], *given, **inputs),
    "distill": lambda *given, **inputs: qjax.training.distill(made()[1], *given, **inputs),
    "equalize": lambda *given, **inputs: qjax.training.equalize(made()[1], *given, **inputs),
    "gptq": lambda *given, **inputs: qjax.training.gptq(made()[1], *given, **inputs),
    "smooth": lambda *given, **inputs: qjax.training.smooth(made()[1], *given, **inputs),
    "output_ranges": lambda *given, **inputs: qjax.training.output_ranges(made()[1], *given, **inputs),
    "widen": lambda *given, **inputs: qjax.training.widen(made()[1], *given, **inputs),
}
"""Every function that takes batches."""


def test_a_function_that_takes_batches_is_listed() -> None:
    homes = [getattr(qjax, name) for name in qjax.__all__] + [
        getattr(qjax.training, name) for name in qjax.training.__all__
    ]
    names = {f.__name__ for f in homes if inspect.isfunction(f) and "batches" in inspect.signature(f).parameters}
    assert names == set(TAKE)


class Seen(Exception):
    """What `inputs` was called with."""


def seen(batch: Any) -> Any:
    raise Seen(batch)


@pytest.mark.parametrize("name", TAKE)
def test_batches_come_in_the_same_three_forms_everywhere(name: str) -> None:
    alone: list[Any] = [X, (X, LABELS), {"image": X}]
    for batch in alone:
        for given in (batch, [batch], iter([batch])):
            with pytest.raises(Seen) as raised:
                TAKE[name](given, inputs=seen)
            assert raised.value.args[0] is batch


def test_a_batch_is_the_arguments_of_a_call() -> None:
    def arguments(batches: Any, inputs: Any = None) -> list[Any]:
        return [tuple(map(str, args)) for args in Batches(batches, inputs, "test").arguments()]

    one, two = (str(X),), (str(X), str(LABELS))
    assert arguments(X) == arguments([X]) == arguments([(X,)]) == arguments(iter([X])) == [one]
    assert arguments((X, LABELS)) == arguments([(X, LABELS)]) == [two]
    assert arguments([X, X]) == [one, one]
    assert arguments([(X, LABELS)], lambda batch: batch[0]) == [one]
    assert arguments([{"a": X, "b": LABELS}], lambda batch: (batch["a"], batch["b"])) == [two]
    assert arguments([{"a": X}]) == [(str({"a": jnp.asarray(X)}),)], "a dict is the one argument"


def test_calibration_finds_the_same_in_each_form() -> None:
    found: set[str] = set()
    for batches, inputs in ((X, None), ([X], None), ([(X,)], None), ([(X, LABELS)], lambda batch: batch[0])):
        copy = nnx.clone(made()[1])
        qjax.calibrate(copy, batches, inputs=inputs)
        found.add(str(copy.qparams()))
    assert len(found) == 1


@pytest.mark.parametrize("name", TAKE)
def test_what_is_no_list_of_batches(name: str) -> None:
    take, who = TAKE[name], f"^{name}: "
    wrong = [(3, "3"), ("images", "str"), (made()[1], "QuantizedModel"), (None, "None")]
    for batches, came in wrong[: 3 if name == "accumulators" else 4]:
        with pytest.raises(TypeError, match=rf"{who}expected batches \(a list of arrays, .*inputs=.*, got {came}"):
            take(batches)
    with pytest.raises(TypeError, match=rf"{who}expected inputs= to be a function .*, got float32\[16,6\]"):
        take([X], inputs=X)
    with pytest.raises(ValueError, match=f"{who}expected at least one batch, got none"):
        take([])
    with pytest.raises(TypeError, match=f"{who}expected a batch to be an array or a tuple .*, got None"):
        take([None])
    with pytest.raises(TypeError, match=f"{who}expected a batch .*, got object"):
        take([object()])
    if name != "search":  # which quantizes first, and takes long
        with pytest.raises(TypeError, match="inputs=lambda batch: batch\\[0\\]"):
            take([(X, LABELS)])


# ---------------------------------------------------------------------------- mistakes


def in_jit(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: jax.jit(function)(X)


def by_nnx_jit(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: nnx.jit(function)(made()[1])


OUTSIDE = "expected arrays with numbers, got .*cannot run inside jit, grad, vmap or scan. Call it outside"
FLOAT_MODEL = "expected a quantized model, got the float model Net. Quantize it first"

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "forward of exact without the model": (
        lambda: qjax.exact(made()[1], X)(X),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"exact: expected the quantized model as the forward's first argument, got float32\[16,6\]. Call forward",
    ),
    "verify swapped": (
        lambda: qjax.verify(made()[1], made()[2], [X]),
        TypeError,
        r"verify: expected a graph from qjax.convert, got QuantizedModel. The order is verify\(graph, qmodel",
    ),
    "accumulators of a model": (
        lambda: qjax.accumulators(made()[1]),
        TypeError,
        r"accumulators: expected a graph .*, got QuantizedModel. Convert a quantized model first",
    ),
    "verify a float model": (lambda: qjax.verify(made()[2], made()[0], [X]), TypeError, f"verify: {FLOAT_MODEL}"),
    "convert a float model": (lambda: qjax.convert(made()[0], X), TypeError, f"convert: {FLOAT_MODEL}"),
    "exact of a float model": (lambda: qjax.exact(made()[0], X), TypeError, f"exact: {FLOAT_MODEL}"),
    "calibrate a float model": (lambda: qjax.calibrate(made()[0], [X]), TypeError, f"calibrate: {FLOAT_MODEL}"),
    "statistics of a float model": (lambda: qjax.statistics(made()[0], [X]), TypeError, f"statistics: {FLOAT_MODEL}"),
    "sensitivity of a float model": (
        lambda: qjax.sensitivity(made()[0], [X]),
        TypeError,
        f"sensitivity: {FLOAT_MODEL}",
    ),
    "weights of a float model": (
        lambda: qjax.training.weights_of(made()[0], X),
        TypeError,
        f"weights_of: {FLOAT_MODEL}",
    ),
    "calibrate a graph": (
        lambda: qjax.calibrate(made()[2], [X]),
        TypeError,
        "calibrate: expected a quantized model, got IntegerGraph",
    ),
    "quantize twice": (
        lambda: qjax.quantize(made()[1], qjax.Recipe(), X),
        TypeError,
        r"quantize: expected a float model, got a quantized one. .*nnx.update\(model, nnx.state\(qmodel.model\)\)",
    ),
    "quantize swapped": (
        lambda: qjax.quantize(made()[0], *cast(Any, (X, qjax.Recipe()))),
        TypeError,
        r"quantize: expected a qjax.Recipe, got float32\[16,6\]. The order is quantize\(model, recipe, sample\)",
    ),
    "quantize with labels": (
        lambda: qjax.quantize(made()[0], qjax.Recipe(), (X, LABELS)),
        TypeError,
        r"__call__ takes \(x\), got 2 arguments: \(float32\[16,6\], int.*\[16\]\).*a sample is the inputs alone",
    ),
    "call with labels": (lambda: made()[1](X, LABELS), TypeError, r"__call__ takes \(x\), got 2 arguments"),
    "quantize in jit": (
        in_jit(lambda x: qjax.quantize(made()[0], qjax.Recipe(), x).qparams()),
        TypeError,
        f"quantize: {OUTSIDE}",
    ),
    "calibrate in jit": (in_jit(lambda x: qjax.calibrate(made()[1], [x])), TypeError, f"calibrate: {OUTSIDE}"),
    "calibrate in nnx.jit": (by_nnx_jit(lambda q: qjax.calibrate(q, [X])), TypeError, f"calibrate: {OUTSIDE}"),
    "convert in jit": (in_jit(lambda x: qjax.convert(made()[1], x)(x)), TypeError, f"convert: {OUTSIDE}"),
    "convert in grad": (
        lambda: nnx.grad(lambda q: qjax.convert(q, X)(X).sum())(made()[1]),
        TypeError,
        f"convert: {OUTSIDE}",
    ),
    "verify in nnx.jit": (
        by_nnx_jit(lambda q: qjax.verify(made()[2], q, [X]).local),
        TypeError,
        f"verify: {OUTSIDE}",
    ),
    "statistics in jit": (in_jit(lambda x: qjax.statistics(made()[1], [x]).examples), TypeError, OUTSIDE),
    "sensitivity in jit": (in_jit(lambda x: qjax.sensitivity(made()[1], [x]).examples), TypeError, OUTSIDE),
    "compare in jit": (in_jit(lambda x: qjax.compare(made()[2], made()[2], x).examples), TypeError, OUTSIDE),
    "accumulators in jit": (in_jit(lambda x: qjax.accumulators(made()[2], x).examples), TypeError, OUTSIDE),
    "a layer of the model inside": (
        lambda: made()[1].head,
        AttributeError,
        r"no attribute 'head'; the model inside it has: use qmodel.model.head",
    ),
    "no attribute at all": (lambda: made()[1].tail, AttributeError, "A QuantizedModel has no attribute 'tail'"),
    "quantize with a wrong shape": (
        lambda: qjax.quantize(made()[0], qjax.Recipe(), X[:, :5]),
        qjax.TraceError,
        r"test_mistakes.py:\d+: Net raises TypeError on a call with \(float32\[16,5\]\): dot_general requires .* Check",
    ),
    "convert with a wrong shape": (
        lambda: qjax.convert(made()[1], X[:, :5]),
        qjax.TraceError,
        r"float32\[16,5\].*The model was quantized with input of shape \(16, 6\). Check the shapes, dtypes",
    ),
    "calibrate with a wrong shape": (
        lambda: qjax.calibrate(nnx.clone(made()[1]), [X[:, :5]]),
        qjax.TraceError,
        r"float32\[16,5\].*The model was quantized with input of shape \(16, 6\)",
    ),
    "call with a wrong shape": (lambda: made()[1](X[:, :5]), qjax.TraceError, r"float32\[16,5\].*\(16, 6\)"),
    "calibrate with a dict for an array": (
        lambda: qjax.calibrate(nnx.clone(made()[1]), [{"image": X}]),
        qjax.TraceError,
        r"on a call with \(\{'image': float32\[16,6\]\}\).* pass inputs=lambda batch: batch\['image'\]",
    ),
    "calibrate with labels": (
        lambda: qjax.calibrate(nnx.clone(made()[1]), [(X, X)]),
        TypeError,
        r"pass inputs=lambda batch: batch\[0\]",
    ),
    "integers for a model of floats": (
        lambda: with_promotion(made()[1], np.ones((16, 6), np.uint8)),
        TypeError,
        r"Input 'input': expected floats, as in the sample .*, got uint8. Convert it",
    ),
    "integers for a graph": (
        lambda: made()[2](np.ones((16, 6), np.int32)),
        TypeError,
        r"Input 'input': expected the floats that the model takes, got int32. Convert it .*graph.run\(codes\)",
    ),
    "load of a .tflite file": (lambda: qjax.load(of_kind("tflite")), ValueError, r"use qjax.read\(path\)"),
    "load of an .onnx file": (
        lambda: qjax.load(of_kind("onnx")),
        ValueError,
        r"qjax.read\(path\) reads .tflite and .onnx",
    ),
    "read of a .qjax file": (lambda: qjax.read(of_kind("qjax")), ValueError, r"qjax.load\(path\) reads it"),
    "an unknown option of read": (lambda: qjax.read(of_kind("onnx"), float=1), TypeError, "Did you mean 'floats'"),
    "a model that returns a class": (
        lambda: qjax.quantize(qjax.from_function(lambda w, x: Unregistered(x @ w), X.T), qjax.Recipe(), X),
        qjax.TraceError,
        r"of the class Unregistered: expected arrays.*jax.tree_util.register_dataclass",
    ),
    "a model that returns text": (
        lambda: qjax.quantize(qjax.from_function(lambda w, x: {"a": x @ w, "b": "text"}, X.T), qjax.Recipe(), X),
        qjax.TraceError,
        r"of the class str at \['b'\]: expected arrays.*Leave it out",
    ),
    "a product of width 0": (
        lambda: qjax.quantize(qjax.from_function(lambda w, x: x @ w, X.T[:, :0]), qjax.Recipe(), X),
        ValueError,
        r"got shape \(16, 0\): .*remove the layer or the slice of width 0",
    ),
    "a constant of jnp as a number": (
        lambda: qjax.quantize(
            qjax.from_function(lambda w, x: x @ w * jnp.linspace(0.0, 1.0, 3)[1].item(), X.T), qjax.Recipe(), X
        ),
        qjax.TraceError,
        r"x.item\(\)\) taken from an array that is being traced.*np.linspace for jnp.linspace",
    ),
    "emit of C to a file": (
        lambda: made()[2].emit("c", "never.c"),
        ValueError,
        r"expected a folder for .*such as 'never'",
    ),
}


@functools.cache
def of_kind(kind: str) -> str:
    """A file of a small graph, in the folder of this run."""
    path = os.path.join(tempfile.mkdtemp(), f"model.{kind}")
    graph = made()[2].retarget("tflite_micro") if kind == "tflite" else made()[2]
    graph.save(path) if kind == "qjax" else graph.emit(kind, path)
    return path


def with_promotion(function: Any, *args: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return function(*args)


@dataclasses.dataclass
class Unregistered:
    y: Any


MISTAKES |= (
    {
        "how scales are learned, in a spec": (
            lambda: QSpec(**cast(Any, {"method": "lsq"})),
            TypeError,
            r"QSpec: expected fields among bits, .*, got method='lsq'. .*Recipe\(method=..., weight_method=...\)",
        ),
        "bits of a recipe": (
            lambda: qjax.Recipe(**cast(Any, {"bits": 4})),
            TypeError,
            r"Recipe: expected fields among target, .*, got bits=4. .*Recipe\(weights=QSpec\(bits=4, axis=-1\)\)",
        ),
        "a field that nothing has": (
            lambda: qjax.Override(**cast(Any, {"speed": 4})),
            TypeError,
            "Override: expected fields among weights, activations, method, got speed=4. Leave it out",
        ),
    }
    | {
        f"{kind.__name__} with {field}": (lambda kind=kind, field=field: cast(Any, kind)(**{field: 4}), TypeError, cure)
        for kind, field, cure in (
            (QSpec, "group", "Did you mean 'group_size'"),
            (qjax.Recipe, "weight", "Did you mean 'weights'"),
            (qjax.Recipe, "activation", "Did you mean 'activations'"),
            (qjax.Dynamic, "weight", "Did you mean 'weights'"),
            (qjax.Dynamic, "bits", r"Dynamic\(weights=QSpec\(bits=4, axis=-1\)\)"),
            (qjax.WeightFormat, "bits", r"The name states the bits.*QSpec\(bits=4"),
            (qjax.WeightFormat, "group", "Did you mean 'group_size'"),
            (qjax.Override, "activation", "Did you mean 'activations'"),
            (qjax.Budget, "mac_bit", "Did you mean 'mac_bits'"),
        )
    }
    | {
        f"{option} of {kind}": (
            lambda kind=kind, option=option: made()[2].emit(kind, "never-written", **{option: 2}),
            TypeError,
            f"emit: {kind}: there is no option '{option}'. Did you mean '{near}'",
        )
        for kind, option, near in (
            ("c", "batches", "batch"),
            ("onnx", "styles", "style"),
            ("stablehlo", "platform", "platforms"),
            ("tflite", "int_4", "int4"),
            ("rtl", "languages", "language"),
        )
    }
    | {
        f"{kind} of a batch of {batch!r}": (
            lambda kind=kind, batch=batch: made()[2].emit(kind, "never-written", batch=batch),
            ValueError,
            f"expected a batch of .*{batch!r}",
        )
        for kind in ("c", "stablehlo", "onnx", "tflite")
        for batch in (1.5, "2", True, 0)
    }
)


def test_no_cure_names_an_override_that_is_not_there() -> None:
    class Cast(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.cumlogsumexp(x.astype(jnp.float16), 1)

    found = qjax.explain(Cast(nnx.Rngs(0)), X)
    assert [row.primitive for row in found.unsupported] == ["cumlogsumexp"]
    assert "override" not in str(found)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_was_expected_what_came_and_the_cure(name: str) -> None:
    function, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        function()


def test_an_error_of_the_users_own_kind_stays_as_it_is() -> None:
    class Mine(RuntimeError):
        pass

    class Failing(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            raise Mine("not today")

    with pytest.raises(Mine) as raised:
        qjax.quantize(Failing(nnx.Rngs(0)), qjax.Recipe(), X)
    assert str(raised.value) == "not today"


def test_exact_may_be_made_inside_of_jit() -> None:
    _, qmodel, graph = made()
    found = nnx.jit(lambda q, x: qjax.exact(q, x)(q, x))(qmodel, X)
    assert np.array_equal(np.asarray(found), np.asarray(graph(X)))


def test_a_progress_bar_knows_how_many_batches_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    _, qmodel, _ = made()

    def batches() -> Iterator[Any]:
        yield X

    qjax.calibrate(nnx.clone(qmodel), [X, X], progress=True)
    assert "batch 2 of 2" in capsys.readouterr().err
    qjax.calibrate(nnx.clone(qmodel), batches(), progress=True)
    assert "calibrate: batch" in capsys.readouterr().err


def test_an_optimizer_of_the_float_model_names_both_trees() -> None:
    """The error is optax's own: the update calls nothing of qjax."""
    model, qmodel, _ = made()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"quantizers.*(\n.*)*body"):
        optimizer.update(qmodel, nnx.state(qmodel, nnx.Param))


@pytest.mark.parametrize("size", [1, 2])
def test_a_cut_of_the_batch_is_seen_in_a_sample_that_it_leaves_whole(size: int) -> None:
    """The graph kept every row of any batch where the model keeps two."""

    class Cut(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x)[:2]

    qmodel = qjax.quantize(Cut(nnx.Rngs(0)), qjax.Recipe(), X)
    qmodel.eval()
    with pytest.raises(qjax.ConversionError, match="A graph has one structure for every batch"):
        qjax.convert(qmodel, X[:size])


@pytest.mark.parametrize(
    "cut",
    {
        "longer than the sample": lambda h: h[:100],
        "the last ones": lambda h: h[-100:],
        "cut and filled up": lambda h: jnp.pad(h[:100], ((0, max(0, h.shape[0] - 100)), (0, 0))),
    }.values(),
)
def test_a_cut_that_is_longer_than_any_sample_is_seen(cut: Callable[[jax.Array], jax.Array]) -> None:
    """Traced with a few examples, the model has no such operation."""

    class Cut(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return cut(super().__call__(x))

    qmodel = qjax.quantize(Cut(nnx.Rngs(0)), qjax.Recipe(), X)
    with pytest.raises(qjax.ConversionError, match=r"test_mistakes.py:\d+.*a batch of 10,007 runs other operations"):
        qjax.convert(qmodel, X)


def test_a_bound_of_a_clip_that_is_nan_is_named() -> None:
    class Clipped(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.clip(super().__call__(x), -1.0, jnp.nan)

    with pytest.raises(
        ValueError, match=r"quantize: .*test_mistakes.py:\d+.*'min' has the bound NaN.*Expected numbers"
    ):
        qjax.quantize(Clipped(nnx.Rngs(0)), qjax.Recipe(), X)


def test_quantize_warns_of_all_that_convert_will_refuse() -> None:
    class Refused(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.lax.cumlogsumexp(super().__call__(x), 1)
            return jax.lax.sort((y, -y), num_keys=2)[1]

    with pytest.warns(
        UserWarning, match=r"convert will refuse it.\n.*'cumlogsumexp'.*has no integer form.*\n.*sort'.*argmax"
    ):
        qmodel = qjax.quantize(Refused(nnx.Rngs(0)), qjax.Recipe(), X)
    assert qmodel(X).shape == (X.shape[0], 4)
    with pytest.raises(qjax.ConversionError, match="cumlogsumexp"):
        qjax.convert(qmodel, X)
