"""Errors about what has no integer form: they name the primitive, the user's line and the cure."""

from collections.abc import Sequence

from qjax.ops import read
from qjax.tracing import ATOMIC, Equation


class ConversionError(ValueError):
    """The model holds something that has no integer form; the message says where and what to do."""


def where(eqn: Equation) -> str:
    """The user's line and module."""
    module = f" in module {eqn.scope!r}" if eqn.scope else ""
    return f"{eqn.location or 'unknown line'}{module}"


_NONLINEAR = (
    "Non-linear functions need a table or an integer approximation: use relu, or keep the function (a softmax, say) "
    "out of the model and apply it to the graph's output."
)
_STATISTICS = (
    "Powers, roots and quotients of activations have no integer form, nor has normalisation by statistics of the input "
    "itself (LayerNorm, GroupNorm, RMSNorm): BatchNorm has."
)
_CHOICE = "Choose by a constant mask, or use relu, maximum, minimum or clip."
_ORDER = "Apply it to the graph's output, or sort outside of the model."
_CURES = {
    **dict.fromkeys(("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "sin", "cos"), _NONLINEAR),
    **dict.fromkeys(ATOMIC, _NONLINEAR),
    **dict.fromkeys(("square", "sqrt", "rsqrt", "div", "pow", "integer_pow"), _STATISTICS),
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "select_n", "sign", "abs"), _CHOICE),
    **dict.fromkeys(("sort", "top_k", "argmax", "argmin"), _ORDER),
    "batch_norm": "It takes the statistics of the batch although the model is converted in evaluation mode: leave "
    "use_running_average=False out of its call.",
    "dropout": "It drops although the model is converted in evaluation mode: leave deterministic=False out of its "
    "call.",
    "pad": "Only padding with 0 (or -inf before a max pool) is representable.",
    "while": "A loop of unknown length cannot become a graph; use a Python loop or lax.scan.",
    "cond": "Choose the branch with a Python value.",
}


def unsupported(eqn: Equation, constant: Sequence[bool] = ()) -> ConversionError:
    """An equation without an integer form; constant: per input, whether it is made from parameters only."""
    shapes = ", ".join("x".join(str(n) for n in shape) or "scalar" for shape in eqn.in_shapes)
    name = eqn.function or eqn.primitive
    message = f"{where(eqn)}: {name!r} on {shapes} has no integer form."
    if eqn.function is None and constant and eqn.outputs[0].is_float and read(eqn, constant) is not None:
        return ConversionError(
            f"{message} The recipe leaves it in reals: drop the qjax.FLOAT override of its module, or take the module "
            "out of the model that is converted."
        )
    cure = _CURES.get(
        name,
        "Replace it by operations that qjax converts (qjax.ops.names()), or move it behind the graph's output.",
    )
    return ConversionError(f"{message} {cure}")


def stacked(eqn: Equation) -> ConversionError:
    """What a scan stacks."""
    return ConversionError(
        f"{where(eqn)}: the outputs that a scan stacks have no integer form yet; only its carry has."
    )
