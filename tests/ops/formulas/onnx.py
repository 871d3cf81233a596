"""What the tests of ONNX Runtime's formulas share: settings that provoke ties, and one way to run a formula."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.ops.formulas import Setting, get

f32 = np.float32


@dataclass(frozen=True)
class Grids:
    """Scales and zero points of the inputs and of the output, whose codes have this dtype."""

    scales: tuple[np.float32, ...]
    zero_points: tuple[int, ...]
    y_scale: np.float32
    y_zero_point: int
    dtype: str

    @property
    def limits(self) -> tuple[int, int]:
        info = np.iinfo(self.dtype)
        return int(info.min), int(info.max)


def grids(dtype: str, seed: int, inputs: int = 2) -> Grids:
    """Ratios of small whole numbers, whose quotients are ties but for their last bits; equal scales; the far ends."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    q = int(rng.choice([3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 24, 48]))
    y_scale = f32(np.exp2(rng.uniform(-9, 0)))
    scales = [f32(f32(rng.integers(1, 2 * q) / (2 * q)) * y_scale) for _ in range(inputs)]
    if seed % 8 == 5:
        scales = [y_scale] * inputs
    elif seed % 8 == 6:
        scales, y_scale = [f32(3.7e5), f32(11.3)][:inputs], f32(1e-4)
    elif seed % 8 == 7:
        scales, y_scale = [f32(1e-20), f32(1e-22)][:inputs], f32(3e-20)
    zero_points = [int(z) for z in rng.integers(info.min, info.max + 1, inputs + 1)]
    return Grids(tuple(scales), tuple(zero_points[1:]), y_scale, zero_points[0], dtype)


def all_pairs(g: Grids) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of centred codes, int32 of shape (256, 256)."""
    low, high = g.limits
    codes = np.arange(low, high + 1, dtype=np.int32)
    a, b = np.meshgrid(codes - np.int32(g.zero_points[0]), codes - np.int32(g.zero_points[1]), indexing="ij")
    return a, b


def clamp(y: np.ndarray, g: Grids) -> np.ndarray:
    return np.clip(y, *g.limits).astype(np.int64)


def evaluate(
    name: str, op: str, operands: Sequence[np.ndarray], g: Grids, count: Any = 1, **attributes: Any
) -> np.ndarray:
    """The formula's clamped codes; prepared on the host and inside of jit, which must agree."""
    shared = isinstance(count, int)
    prepare, finish, traced = (_functions if shared else _functions.__wrapped__)(
        name, op, g.dtype, g.limits, count, tuple(attributes.items())
    )
    codes = [np.asarray(x, np.int32) for x in operands]
    zero_points = tuple(np.int32(z) for z in g.zero_points)
    given = (g.scales, zero_points, g.y_scale, np.int32(g.y_zero_point))
    roles = prepare(*given)
    for role, value in roles.items():
        assert np.asarray(value).dtype == np.int32, role
        assert not isinstance(value, jax.Array), role
    on_host = finish(roles, given, codes)
    np.testing.assert_array_equal(traced(given, codes), on_host)
    return np.asarray(on_host).astype(np.int64)


@functools.cache
def _functions(name: str, op: str, dtype: str, limits: Any, count: Any, attributes: Any) -> tuple[Any, Any, Any]:
    """prepare, and the jitted kernel with constants prepared outside and inside of it."""
    formula = get(name)

    def prepare(scales: Any, zero_points: Any, y_scale: Any, y_zero_point: Any) -> dict[str, Any]:
        return formula.prepare(Setting(op, scales, zero_points, y_scale, y_zero_point, dtype, count))

    def finish(roles: dict[str, Any], given: Any, codes: Any) -> jax.Array:
        constants = {**roles, **{f"zero_point{i}": z for i, z in enumerate(given[1])}}
        constants.update(y_zero_point=given[3], count=np.asarray(count, np.int32))
        y = formula.kernel(codes, constants, {"dtype": dtype, **dict(attributes)})
        assert y.dtype == jnp.int32
        return jnp.clip(y, *limits)

    return prepare, jax.jit(finish), jax.jit(lambda given, codes: finish(prepare(*given), given, codes))
