"""Errors for what has no integer form: they name the primitive, the user's line and the cure."""

import jax.numpy as jnp
import numpy as np

from qjax.ops import float_programs
from qjax.support.errors import Unsupported
from qjax.tracing import Composite, Equation


class ConversionError(Unsupported):
    """A part of the model has no integer form; the message names the place and the cure.

    Examples:
      ```python
      sorting = qjax.from_function(
          lambda w, x: jnp.lexsort((x @ w, x)), np.eye(8, dtype=np.float32)
      )
      sorted_model = qjax.quantize(sorting, recipe, x)  # warns already
      try:
          qjax.convert(sorted_model, x)
      except qjax.ConversionError as error:
          print(error)  # the primitive, your line and a cure
      ```
    """


_ISLAND = "Or keep it in float, as a part between integers: Recipe(overrides={{{scope!r}: qjax.FLOAT}})."
_CUT = "Or cut the model there: return what flows into it, and compute the rest from the graph's outputs, in float."
_STATISTICS = "Write it as a function that qjax knows: qjax.ops.names() lists what has integer kernels."
_WRITES = (
    "Write slices or elements with `set`, add to constant positions or to a few per example (32 at most), select with "
    "jnp.where and a mask, or join parts with jnp.concatenate."
)
_READS = (
    "Take along one axis (jnp.take), or select separately for every example (jnp.take_along_axis, x[rows, i, j]). "
    "Replace a fill_value for indices out of range by jnp.where."
)
_ORDER = "argmax, argmin, argsort, max, top_k and sorts by one key have integer forms: use one of them."
_EXPERTS = (
    "jax.lax.ragged_dot has an integer form where its second operand is a parameter and no jax.vmap is around it. Or "
    "let every row meet every expert, and choose: jnp.einsum, then jnp.take_along_axis."
)
_PRODUCT = "At most 4096 elements are multiplied: multiply in parts."
_MEMBERS = "A graph runs on one machine: move sums over devices out of the converted part."
_LOGITS = "Return the numbers that go into it (the logits), and take it, or the loss, of the dequantized outputs."
_EDGES = "Count how many edges lie below the number: jnp.sum(x[..., None] >= edges, axis=-1)."
_WHOLE = (
    "In a graph a float is a code with a scale, so no cast makes it an integer. The index of a bin is a count of "
    "edges: jnp.sum(x[..., None] >= edges, axis=-1). Whole numbers that may stay floats are jnp.floor(x), jnp.round(x)."
)
_KNOTS = (
    "Write it piece by piece in a Python loop, which becomes one table: "
    "y = jnp.where(x < knot, y, value + slope * (x - knot)) for every knot."
)
_CALLBACK = (
    "A graph runs without Python: move the call out of the converted part, for instance behind a flag of the module."
)
_RUN_TIME_CHECK = (
    "It belongs to a run-time check of equinox. A check that raises an error is left out, but not one that returns NaN "
    "or opens a debugger: unset EQX_ON_ERROR and leave out on_error, or turn the checks off with EQX_ON_ERROR=off."
)
_RANDOM = "Switch it off in evaluation mode (module.eval()), or draw the numbers outside and pass them in."
_FREQUENCY = "Its length is above 4096, or changes: transform parts of the signal."
_REALS = (
    "Pass and return jnp.real(z) and jnp.imag(z), and compute this operation from both. Sums, products, "
    "quotients, exp, abs and Fourier transforms of complex numbers need no change."
)
_UNSIGNED = (
    "A graph holds integers as int32, where numbers of uint32 from 2^31 on are negative. Compute with int32, or cast "
    "with .astype(jnp.int32) before you compare or select."
)
_LOOP = (
    "A loop of unknown length cannot become a graph, nor one of more than 4096 iterations: its condition must count "
    "from a constant to a constant. Or use a Python loop or lax.scan, and freeze finished results with jnp.where."
)
_CURES = {
    **dict.fromkeys(("sort", "argsort", "approx_top_k"), _ORDER),
    **dict.fromkeys(
        (*(f"scatter{kind}" for kind in ("", "-add", "-sub", "-mul", "-min", "-max")), "dynamic_update_slice"), _WRITES
    ),
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), _EXPERTS),
    **dict.fromkeys(("cumprod", "reduce_prod"), _PRODUCT),
    **dict.fromkeys(
        """psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all ppermute
        axis_index""".split(),  # noqa: SIM905
        _MEMBERS,
    ),
    "shard_map": "A graph runs on one machine: build the model with a mesh of one device, on which jax.shard_map is a "
    "call.",
    **dict.fromkeys(("logsumexp", "cumlogsumexp", "log_softmax"), _LOGITS),
    **dict.fromkeys(("digitize", "searchsorted"), _EDGES),
    "interp": _KNOTS,
    **dict.fromkeys(("gather", "dynamic_slice"), _READS),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "ffi_call"), _CALLBACK),
    **dict.fromkeys(("unvmap_any", "unvmap_all", "unvmap_max"), _RUN_TIME_CHECK),
    **dict.fromkeys(("random_bits", "random_wrap", "random_seed", "random_fold_in", "threefry2x32"), _RANDOM),
    **dict.fromkeys(("fft",), _FREQUENCY),
    **dict.fromkeys(("while",), _LOOP),
    **dict.fromkeys(("cholesky", "eigh", "eig", "lu", "qr", "svd"), "Solve it outside of the model."),
    "triangular_solve": "Up to 128 rows have one: use smaller chunks, or solve it outside of the model.",
    "batch_norm": "It takes the statistics of the batch although the model is converted in evaluation mode: leave "
    "use_running_average=False out of its call.",
    "dropout": "It drops although the model is converted in evaluation mode: leave deterministic=False out of its "
    "call.",
    "pad": "Only padding with 0 (or -inf before a max pool) is representable: pad with that.",
    "cond": "Choose the branch by a Python value, or compute both and select with jnp.where.",
}


def problem_of(eqn: Equation) -> str:
    """Describe what has no integer form, with its shapes and its place."""
    return f"{eqn.where}: {_reason(eqn)}."


def _reason(eqn: Equation) -> str:
    shapes = ", ".join("x".join(str(n) for n in shape) or "scalar" for shape in eqn.in_shapes)
    if _is_complex(eqn):
        return (
            f"{eqn.primitive!r} on {shapes}: complex numbers are passed to the model here, or returned, or read by an "
            "operation that has no form in pairs of real numbers"
        )
    return f"{(eqn.function or eqn.primitive)!r} on {shapes} has no integer form"


def cures_of(eqn: Equation) -> tuple[str, str]:
    """Two cures, the first specific to this primitive."""
    possible = eqn.scope and all(primitive in float_programs.STEPS for primitive in _primitives(eqn))
    second = _ISLAND.format(scope=eqn.scope) if possible else _CUT
    unsigned = bool(eqn.out_dtypes) and eqn.out_dtypes[0] == np.uint32
    first = _CURES.get(eqn.function or eqn.primitive, _UNSIGNED if unsigned else _STATISTICS)
    if _is_complex(eqn):
        first = _FREQUENCY if eqn.primitive == "fft" else _REALS
    elif eqn.primitive == "convert_element_type" and eqn.inputs[0].is_float and not eqn.outputs[0].is_float:
        first = _WHOLE
    return first, second


def _is_complex(eqn: Equation) -> bool:
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (*eqn.in_dtypes, *eqn.out_dtypes))


def _primitives(eqn: Equation) -> list[str]:
    if isinstance(eqn.source, Composite):
        return [name for part in eqn.source.equations for name in _primitives(part)]
    return [eqn.source.primitive.name]


def unsupported(eqn: Equation) -> ConversionError:
    """The error for an equation without an integer form."""
    return ConversionError(_reason(eqn), " ".join([*cures_of(eqn), _EXPLAIN]), where=eqn.where)


_EXPLAIN = "qjax.explain(model, sample) lists everything of this kind at once."


def stacked(eqn: Equation) -> ConversionError:
    """The error for the outputs that a scan stacks."""
    return ConversionError(
        "the outputs that a scan stacks have no integer form yet; only its carry has.", where=eqn.where
    )
