"""How the tests of PyTorch's formulas run one: compiled once per formula, with every scale as an argument."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.ops.formulas import Setting, get
from tests.ops.formulas.onnx import Grids, clamp


def run(name: str, op: str, operands: Sequence[np.ndarray], g: Grids, count: Any = 1, rows: bool = False) -> np.ndarray:
    """The formula's clamped codes; its constants, prepared on the host and in the trace, must agree.

    rows: every row of the operands is a tensor of its own.
    """
    given = (
        g.scales,
        tuple(np.int32(z) for z in g.zero_points),
        g.y_scale,
        np.int32(g.y_zero_point),
    )
    counts = tuple(np.asarray(count).reshape(-1).tolist())
    codes, traced = _compiled(name, op, g.dtype, counts, np.shape(count), rows)(
        given, [np.asarray(x, np.int32) for x in operands]
    )
    host = get(name).prepare(Setting(op, *given, g.dtype, count))
    assert host.keys() == traced.keys()
    for role, value in host.items():
        assert np.asarray(value).dtype == np.int32, role
        assert not isinstance(value, jax.Array), role
        np.testing.assert_array_equal(traced[role], value, err_msg=role)
    return clamp(np.asarray(codes).astype(np.int64), g)


@functools.cache
def _compiled(
    name: str, op: str, dtype: str, counts: tuple[int, ...], shape: tuple[int, ...], rows: bool
) -> Callable[..., Any]:
    formula = get(name)
    count = np.asarray(counts, np.int32).reshape(shape)

    def compute(given: Any, codes: Any) -> Any:
        scales, zero_points, y_scale, y_zero_point = given
        number = count if shape else counts[0]
        roles = formula.prepare(Setting(op, scales, zero_points, y_scale, y_zero_point, dtype, number))
        constants = {**roles, **{f"zero_point{i}": z for i, z in enumerate(zero_points)}}
        constants.update(y_zero_point=y_zero_point, count=count)

        def kernel(*codes: jax.Array) -> jax.Array:
            return formula.kernel(codes, constants, {"dtype": dtype})

        y = jax.vmap(kernel)(*codes) if rows else kernel(*codes)
        assert y.dtype == jnp.int32
        return y, roles

    return jax.jit(compute)
