"""What the cases of the conformance matrix are made of: scales, zero points, codes, and whole products with weights.

Each takes numbers from the stream of `r` in a fixed order, on which recorded answers depend.
"""

import numpy as np

from conformance.case import Case, Grid


def grid_of(scale: np.floating | np.ndarray, zero_point: int, dtype: str) -> Grid:
    """A grid of those numbers."""
    return Grid(np.asarray(scale, np.float32), int(zero_point), dtype)


def draw_scale(r: np.random.RandomState, index: int) -> np.float32:
    """Every third scale is a power of two."""
    return np.float32(2.0 ** r.randint(-8, 1)) if index % 3 == 0 else np.float32(np.exp(r.uniform(-6, 0)))


def draw_scales(r: np.random.RandomState, index: int, channels: int | None) -> np.ndarray:
    """Scales of so many channels, three of ten powers of two; None: one `draw_scale`."""
    if channels is None:
        return np.asarray(draw_scale(r, index))
    values = np.exp(r.uniform(-7, -1, channels)).astype(np.float32)
    powers = np.float32(2.0) ** r.randint(-9, -1, channels)
    return np.where(r.rand(channels) < 0.3, powers, values).astype(np.float32)


def draw_near_tie(r: np.random.RandomState, op: str, dtype: str) -> tuple[np.float32, int]:
    """A scale and a zero point under which one code's sigmoid (at 1/256) or tanh (at 1/128) is nearly k + 1/2 steps."""
    info = np.iinfo(dtype)
    half = r.randint(1, 127) + 0.5
    # The sigmoid of v is (1 + tanh(v / 2)) / 2.
    v = np.arctanh(half / 128) * (2 if op == "logistic" else 1)
    steps = r.randint(1, info.max - info.min + 1)
    up = r.rand() < 0.5
    z = int(r.randint(info.min, info.max - steps + 1)) if up else int(r.randint(info.min + steps, info.max + 1))
    s = np.asarray(np.float32(v / steps)).reshape(1)
    return (s.view(np.int32) + r.randint(-2, 3)).astype(np.int32).view(np.float32)[0], z


def draw_zero_point(r: np.random.RandomState, dtype: str) -> int:
    """Any code; 0 with 16 bits."""
    info = np.iinfo(dtype)
    return 0 if info.bits == 16 else int(r.randint(info.min, info.max + 1))


def draw_codes(
    r: np.random.RandomState, dtype: str, shape: tuple[int, ...], codes: tuple[int, int] | None = None
) -> np.ndarray:
    """Codes of a dtype or a range, every twentieth at an end."""
    info = np.iinfo(dtype)
    low, high = codes or (info.min, info.max)
    values = r.randint(low, high + 1, shape)
    edges = r.rand(*shape) < 0.05
    values[edges] = np.where(r.rand(int(edges.sum())) < 0.5, low, high)
    return values.astype(dtype)


def weighted(
    op: str,
    r: np.random.RandomState,
    x: str,
    kernel: str,
    shape: tuple[int, ...],
    window: tuple[int, ...],
    s_x: np.float32,
    s_w: np.ndarray,
    codes: tuple[int, int] | None,
    attributes: dict[str, object],
) -> Case:
    """A product whose accumulators fill the range of the output, and sometimes leave it.

    x, kernel: dtypes. shape: of the input; window: of the kernel. codes: as for `cases.conv2d`.
    """
    z_x = draw_zero_point(r, x) if codes is None else int(r.randint(codes[0], codes[1] + 1))
    inputs = draw_codes(r, x, shape, codes)
    symmetric = (-127, 127) if kernel == "int8" else (0, 255)
    weights = draw_codes(r, kernel, window, symmetric)
    z_w = 0 if kernel == "int8" else 128
    depth = int(np.prod(window[:-1]))
    # 74 and 18919 are the standard deviations of uniform codes of 8 and of 16 bits.
    narrow = np.iinfo(x).bits == 8
    spread = np.sqrt(depth) * 74 * (74 if narrow else 18919)
    bias = r.randint(-int(spread), int(spread), window[-1]).astype(np.int32)
    # The standard deviation of the accumulator becomes a quarter of the output's range, at times with an output scale
    # that is an exact power of two.
    typical = np.float64(s_x) * np.float64(np.median(s_w)) * spread
    s_y = np.float32(typical / r.uniform(30, 90) / (1 if narrow else 256))
    if np.log2(float(s_x)) % 1 == 0:
        s_y = np.float32(2.0 ** np.round(np.log2(s_y)))
    output = grid_of(s_y, draw_zero_point(r, x), x)
    return Case(op, (inputs,), (grid_of(s_x, z_x, x),), output, weights, grid_of(s_w, z_w, kernel), bias, attributes)


def extreme_accumulators(
    op: str,
    r: np.random.RandomState,
    x: str,
    kernel: str,
    shape: tuple[int, ...],
    window: tuple[int, ...],
    index: int,
    per_channel: bool,
    attributes: dict[str, object] | None = None,
) -> Case:
    """Zero weights: the accumulator is the bias, here anything that the output's range makes interesting."""
    channels = window[-1]
    s_x = np.float32(2.0**-4) if index % 2 else draw_scale(r, 1)
    s_w = draw_scales(r, index, channels) if per_channel else np.asarray(np.float32(2.0 ** -(3 + index)))
    s_y = np.float32((2.0**-2, 0.37, 2.0**3, 900.0, 0.01, 2.0**-6, 1.7, 2.0**9)[index])
    e = np.broadcast_to(np.float64(s_x) * np.float64(s_w) / np.float64(s_y), (channels,))
    narrow = np.iinfo(x).bits == 8
    targets = r.randint(-300, 300, channels) * (1 if narrow else 120) + r.choice([0.0, 0.5, 0.5, 0.25], channels)
    # The int16 kernels require a result that fits int32.
    limit = 2**30 if narrow else np.minimum(2**30, 2**30 / e)
    bias = np.clip(np.rint(targets / e), -(2**30), 2**30).astype(np.int64)
    bias[:4] = [2**30, -(2**30), 1, -1]
    bias = np.clip(bias, -limit, limit).astype(np.int64)
    z_w = 0 if kernel == "int8" else 128
    weights = np.full(window, z_w).astype(kernel)
    return Case(
        op,
        (draw_codes(r, x, shape),),
        (grid_of(s_x, draw_zero_point(r, x), x),),
        grid_of(s_y, draw_zero_point(r, x), x),
        weights,
        grid_of(s_w, z_w, kernel),
        bias.astype(np.int32),
        attributes or {},
    )
