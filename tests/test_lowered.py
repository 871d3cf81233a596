"""What is lowered of a model of each kind: the same under every setting of JAX, and no binary64 for a TPU."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import qjax
from tests.layers.kinds import KINDS, made

PLATFORMS = ("cpu", "cuda", "tpu")
KEPT = ("dense",)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The functions of one quantized model, and their arguments."""

    forward: Callable[..., Any]
    step: Callable[..., Any]
    exact: Callable[..., Any]
    run: Callable[..., Any]
    args: tuple[Any, ...]
    codes: tuple[Any, ...]


def functions(kind: str) -> Functions:
    model, x, recipe = made(kind)
    qmodel = qjax.quantize(model, recipe, x)
    qmodel.eval()
    graph, exact = qjax.convert(qmodel, x), qjax.exact(qmodel, x)
    definition, state = nnx.split(qmodel)

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(definition, state)(x)

    def step(state: Any, x: Any) -> Any:
        return nnx.grad(lambda qmodel: jnp.sum(jnp.square(qmodel(x))))(nnx.merge(definition, state))

    return Functions(
        forward,
        step,
        lambda state, x: exact(nnx.merge(definition, state), x),
        graph.run,
        (state, x),
        tuple(jax.tree.leaves(graph.quantize(x))),
    )


def on_host(function: Any, result: Any, *args: Any, **_: Any) -> Any:
    """In place of `jax.pure_callback`, which is lowered for the platform of this process only."""
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), result)


@pytest.fixture
def without_callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Callbacks return zeros, and nothing traced meanwhile stays for later tests."""
    monkeypatch.setattr(jax, "pure_callback", on_host)
    yield
    jax.clear_caches()


def lowered(
    function: Callable[..., Any], args: tuple[Any, ...], platforms: tuple[str, ...] = PLATFORMS
) -> dict[str, str]:
    traced = jax.jit(function).trace(*args)
    return {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in platforms}


def body(text: str) -> str:
    """Without the name of the module."""
    return text.partition("\n")[2]


def products(text: str) -> Counter[str]:
    """The dtypes of the operands of products and convolutions, and how many there are."""
    found = re.findall(r"stablehlo\.(?:dot_general|convolution).*: \(tensor<(\S+)>, tensor<(\S+)>\) ->", text)
    return Counter("x".join(sorted({shape.rsplit("x", 1)[-1] for shape in shapes})) for shapes in found)


@pytest.mark.parametrize("kind", [k if k in KEPT else pytest.param(k, marks=pytest.mark.exhaustive) for k in KINDS])
@pytest.mark.usefixtures("without_callbacks")
def test_settings_and_platforms(kind: str) -> None:
    made = functions(kind)

    step, exact, run = (
        lowered(function, args)
        for function, args in ((made.step, made.args), (made.exact, made.args), (made.run, made.codes))
    )
    forward = lowered(made.forward, made.args)

    with (
        jax.default_matmul_precision("BF16_BF16_F32"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for texts, function, args in (
            (forward, made.forward, made.args),
            (exact, made.exact, made.args),
            (run, made.run, made.codes),
        ):
            # a function of its own: jit keeps what it traced of one
            again = jax.jit(lambda *args, function=function: function(*args)).trace(*args)
            text = again.lower(lowering_platforms=("cpu",)).as_text()
            assert products(text)
            assert body(text) == body(texts["cpu"])

    assert [text.count("f64") for text in (step["tpu"], exact["tpu"], run["tpu"])] == [0, 0, 0]
    assert all("f64" not in texts[platform] for texts in (step, run) for platform in PLATFORMS)
    # what counts them finds them where they are
    assert "f64" in exact["cpu"]
    assert "f64" in exact["cuda"]

    narrow = "12 bits" not in kind
    for platform in PLATFORMS:
        assert sum(products(run[platform]).values()) > 0
        if narrow:
            assert set(products(run[platform])) == {"i8"}
            assert products(exact[platform])["i8"] >= products(run["tpu"])["i8"]
    # in training the forward's products are int8 on the CPU, and bfloat16 elsewhere, where float32 holds their sums;
    # convolutions of wider codes are int32; the backward's are float32
    assert set(products(step["cpu"])) == ({"i8", "f32"} if narrow and "groups" not in kind else {"f32"})
    assert (
        set(products(step["cuda"]))
        == set(products(step["tpu"]))
        == {"f32"}
        | (
            {"i32"}
            if kind == "convolutional of 12 bits"
            else {"bf16"}
            if narrow and "groups" not in kind
            else set[str]()
        )
    )


@pytest.mark.usefixtures("without_callbacks")
def test_a_norm_and_a_softmax_on_a_tpu() -> None:
    """What `test_settings_and_platforms` says of `attention`, which is in `make test-all`, in short."""
    made = functions("attention")
    exact, run = lowered(made.exact, made.args, ("tpu",))["tpu"], lowered(made.run, made.codes)
    assert "f64" not in exact
    assert products(exact)["i8"] >= products(run["tpu"])["i8"]
    assert all("f64" not in text and set(products(text)) == {"i8"} for text in run.values())
