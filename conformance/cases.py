"""The inputs of the conformance matrix: seeded, and chosen to tell roundings apart.

Every list mixes ordinary data with inputs on which roundings differ: equal scales and powers of two (ties),
odd zero points, effective scales far below and above 1, accumulators at the edges of int32 fed as the bias of zero
weights, saturating outputs. `RandomState` keeps its stream over versions of numpy, so recorded answers stay valid.
"""

import dataclasses

import numpy as np

from conformance.case import Case
from conformance.pieces import (
    draw_codes,
    draw_near_tie,
    draw_scale,
    draw_scales,
    draw_zero_point,
    extreme_accumulators,
    grid_of,
    weighted,
)

Cases = list[Case]

DEPTHWISE_CHANNELS = (16, 32, 12, 7, 41, 17)
"""Whole vectors of 8 channels and rests; the optimised kernels finish a rest otherwise."""


def fully_connected(
    x: str, *, per_channel: bool, kernel: str = "int8", codes: tuple[int, int] | None = None, seed: int = 1
) -> Cases:
    """14 cases of 128 x 32 by 32 x 64 and 8 of extreme accumulators, 131,072 outputs.

    x: dtype of input and output. codes: the range of the input's codes, where it is narrower than the dtype.
    """
    r = np.random.RandomState(seed)
    found: Cases = []
    for index in range(14):
        s_x, s_w = draw_scale(r, index), draw_scales(r, index, 64 if per_channel else None)
        found.append(weighted("fully_connected", r, x, kernel, (128, 32), (32, 64), s_x, s_w, codes, {}))
    for index in range(8):
        found.append(extreme_accumulators("fully_connected", r, x, kernel, (1, 8), (8, 2048), index, per_channel))
    return found


def conv2d(
    x: str, *, per_channel: bool, kernel: str = "int8", codes: tuple[int, int] | None = None, seed: int = 2
) -> Cases:
    """Windows of 3x3 and 1x1, strides 1 and 2, SAME and VALID; 123,136 outputs with those of extreme accumulators."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for index in range(8):
        s_x, s_w = draw_scale(r, index), draw_scales(r, index, 32 if per_channel else None)
        shape, window = ((2, 14, 14, 8), (3, 3, 8, 32)) if index % 4 else ((2, 14, 14, 16), (1, 1, 16, 32))
        known = {"strides": (2, 1) if index == 3 else (1, 1), "padding": "VALID" if index == 2 else "SAME"}
        found.append(weighted("conv2d", r, x, kernel, shape, window, s_x, s_w, codes, known))
    known = {"strides": (1, 1), "padding": "VALID"}
    for index in range(4):
        found.append(
            extreme_accumulators("conv2d", r, x, kernel, (1, 3, 3, 4), (1, 1, 4, 1024), index, per_channel, known)
        )
    return found


def depthwise_conv2d(
    x: str,
    *,
    per_channel: bool,
    kernel: str = "int8",
    codes: tuple[int, int] | None = None,
    multiplier: int = 1,
    channels: tuple[int, ...] = (16, 32),
    seed: int = 3,
) -> Cases:
    """Windows of 3x3 and 5x5, strides 1 and 2, SAME and VALID; about 130,000 outputs of 16 and 32 channels.

    channels: of the inputs, in turn.
    """
    r = np.random.RandomState(seed)
    found: Cases = []
    for index in range(12):
        width = channels[index % len(channels)]
        features = width * multiplier
        s_x, s_w = draw_scale(r, index), draw_scales(r, index, features if per_channel else None)
        window = (5, 5) if index == 5 else (3, 3)
        known = {"strides": (2, 2) if index == 3 else (1, 1), "padding": "VALID" if index == 2 else "SAME"}
        shape = (2, 16, 16, width)
        found.append(weighted("depthwise_conv2d", r, x, kernel, shape, (*window, 1, features), s_x, s_w, codes, known))
    return found


def single_rows(*, per_channel: bool, seed: int = 11) -> Cases:
    """Extreme accumulators where kernels change: one row or pixel and two, depths of 7 to 9, 3 channels and 4."""
    r = np.random.RandomState(seed)
    known = {"strides": (1, 1), "padding": "VALID"}
    found: Cases = []
    for index in range(4):
        for depth, channels in ((7, 1024), (8, 1024), (9, 1023), (8, 4)):
            for rows in (1, 2):
                shape, window = (rows, depth), (depth, channels)
                found.append(
                    extreme_accumulators("fully_connected", r, "int8", "int8", shape, window, index, per_channel)
                )
        for shape, window in (
            ((1, 1, 1, 8), (1, 1, 8, 1024)),
            ((1, 1, 1, 7), (1, 1, 7, 1024)),
            ((1, 2, 2, 2), (2, 2, 2, 1024)),
            ((1, 1, 2, 8), (1, 1, 8, 1024)),
            ((2, 1, 1, 8), (1, 1, 8, 1024)),
        ):
            found.append(extreme_accumulators("conv2d", r, "int8", "int8", shape, window, index, per_channel, known))
    # These have 3 channels, which are too few for the accumulators above.
    for _ in range(64):
        s_x, s_w = draw_scale(r, 1), draw_scales(r, 1, 3 if per_channel else None)
        found.append(weighted("fully_connected", r, "int8", "int8", (1, 8), (8, 3), s_x, s_w, None, {}))
    return found


def depthwise_scales_above_1(*, per_channel: bool, seed: int = 12) -> Cases:
    """Small accumulators under effective scales from 2^-3 to 2^6, in windows of 3x3 and others; some beyond 2^29."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for index in range(24):
        channels, multiplier = ((8, 1), (24, 1), (64, 1), (12, 1), (8, 2), (16, 1))[index % 6]
        features = channels * multiplier
        size = ((5, 7), (8, 8), (6, 6), (3, 3))[r.randint(4)]
        stride = int(r.randint(1, 3))
        known = {"strides": (stride, stride), "padding": "VALID" if r.rand() < 0.5 else "SAME"}
        window = (3, 3) if r.rand() < 0.8 else (2, 2)
        s_x, s_w = draw_scale(r, index), draw_scales(r, index, features if per_channel else None)
        effective = np.float32(np.exp2(r.uniform(-3, 6)))
        s_y = np.float32(s_x * np.median(s_w) / effective)
        bias = r.randint(-40, 41, features).astype(np.int32)
        bias[r.rand(features) < 0.05] = 2**29 + 12345
        found.append(
            Case(
                "depthwise_conv2d",
                (r.randint(-4, 5, (2, *size, channels)).astype(np.int8),),
                (grid_of(s_x, int(r.randint(-3, 4)), "int8"),),
                grid_of(s_y, draw_zero_point(r, "int8"), "int8"),
                r.randint(-3, 4, (*window, 1, features)).astype(np.int8),
                grid_of(s_w, 0, "int8"),
                bias,
                known,
            )
        )
    return found


def mean_elsewhere(x: str) -> Cases:
    """The means of `mean`, over one axis each and over width and channels."""
    axes: list[tuple[int, ...]] = [(1,), (2,), (3,), (2, 3)]
    return [dataclasses.replace(case, attributes={"axes": axes[index % 4]}) for index, case in enumerate(mean(x))]


def mean_fused(*, seed: int = 13) -> Cases:
    """Means whose float32 steps round otherwise apart than fused: 40 cases of up to 192 outputs, found by search."""
    r = np.random.RandomState(seed)
    found: Cases = []
    while len(found) < 40:
        height, width = ((1, 2), (2, 2), (3, 3), (2, 4), (5, 5), (7, 7), (12, 12))[r.randint(7)]
        n = height * width
        z_x, z_y = (draw_zero_point(r, "int8") for _ in range(2))
        s_x = np.float32(np.exp(r.uniform(-6, 0)))
        s_y = np.float32(s_x * 2.0 ** -r.randint(0, 3) if r.rand() < 0.5 else s_x / n * r.randint(1, 40))
        scale = np.float32(np.float32(s_x / s_y) * np.float32(np.float32(1) / np.float32(n)))
        sums = np.arange(-128 * n, 127 * n + 1)
        # Products of 24 by 15 bits are exact in double. The rounding of their sums does not matter to a search.
        offset = np.float64(z_y) - np.float64(n * z_x) * np.float64(scale)
        apart = np.float32(z_y) - np.float32(n * z_x) * scale
        fused = np.rint((sums * np.float64(scale) + np.float64(np.float32(offset))).astype(np.float32))
        steps = np.rint(sums.astype(np.float32) * scale + apart)
        which = sums[np.clip(fused, -128, 127) != np.clip(steps, -128, 127)][:192]
        if which.size == 0:
            continue
        codes = np.repeat((which // n)[:, None], n, axis=1) + (np.arange(n) < (which % n)[:, None])
        x = codes.astype(np.int8).reshape(-1, height, width, 1)
        attributes = {"axes": (1, 2)}
        found.append(Case("mean", (x,), (grid_of(s_x, z_x, "int8"),), grid_of(s_y, z_y, "int8"), attributes=attributes))
    return found


def elementwise(op: str, x: str, *, seed: int = 4) -> Cases:
    """Every pair of 8-bit codes under 4 settings of scales (262,144 outputs); of 16-bit ones 65,536 pairs each."""
    r = np.random.RandomState(seed + len(op))
    found: Cases = []
    info = np.iinfo(x)
    for index in range(4):
        if info.bits == 8:
            a, b = np.meshgrid(np.arange(info.min, info.max + 1), np.arange(info.min, info.max + 1))
        else:
            a, b = r.randint(info.min, info.max + 1, (2, 256, 256))
        s_a, s_b = draw_scale(r, index), draw_scale(r, index + (index > 1))
        if index == 0:
            s_b = s_a
        z_a, z_b, z_y = (draw_zero_point(r, x) for _ in range(3))
        reach = (s_a + s_b if op == "add" else s_a * s_b * np.float32(128)) * np.float32(r.uniform(0.4, 1.1))
        s_y = np.float32((s_a, np.float32(2.0) * s_a, reach, reach)[index] if op == "add" else reach)
        if op == "multiply" and index == 0:
            s_a, s_b, s_y = np.float32(0.25), np.float32(0.125), np.float32(2.0)
        found.append(
            Case(
                op,
                (a.astype(x), b.astype(x)),
                (grid_of(s_a, z_a, x), grid_of(s_b, z_b, x)),
                grid_of(s_y, z_y, x),
            )
        )
    return found


def matmul(x: str, *, seed: int = 14) -> Cases:
    """Products of two activations, depths of 1 to 200; 107,520 outputs."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for index, depth in enumerate((1, 3, 8, 17, 64, 200)):
        a, b = draw_codes(r, x, (7, 64, depth)), draw_codes(r, x, (7, depth, 40))
        s_a, s_b = draw_scale(r, index), draw_scale(r, index + 1)
        z_a, z_b, z_y = (draw_zero_point(r, x) for _ in range(3))
        reach = 60 * np.sqrt(depth) * r.uniform(0.5, 3)
        s_y = np.float32(s_a * s_b * np.float32(2.0 ** np.rint(np.log2(reach)) if index % 3 == 0 else reach))
        found.append(Case("matmul", (a, b), (grid_of(s_a, z_a, x), grid_of(s_b, z_b, x)), grid_of(s_y, z_y, x)))
    return found


def rescale(x: str, y: str, *, count: int = 48, seed: int = 5) -> Cases:
    """Every code of `x` under `count` pairs of scales; there are no other inputs to this operation."""
    r = np.random.RandomState(seed)
    info = np.iinfo(x)
    codes = np.arange(info.min, info.max + 1).astype(x).reshape(16, -1)
    found: Cases = []
    for index in range(count):
        s_x = draw_scale(r, index)
        ratio = np.float32((1.0, 2.0, 0.5, 4.0, 3.0)[index] if index < 5 else np.exp(r.uniform(-2.5, 2.5)))
        found.append(
            Case(
                "rescale",
                (codes,),
                (grid_of(s_x, draw_zero_point(r, x), x),),
                grid_of(s_x * ratio, draw_zero_point(r, y), y),
            )
        )
    return found


def quantize(y: str, *, seed: int = 6) -> Cases:
    """65,536 floats under 4 grids: ties, their float32 neighbours, random and large numbers."""
    r = np.random.RandomState(seed)
    info = np.iinfo(y)
    found: Cases = []
    for index in range(4):
        s, z = np.float32((0.5, 0.1, 0.0123, 3.7)[index]), (1, -3, 0, 7)[index] - (info.min + 128 if info.min else 0)
        z = int(np.clip(z if info.min else z + 120, info.min, info.max))
        halves = (r.randint(-700, 700, 16384) + np.float32(0.5)) * s
        x = np.concatenate(
            [
                halves,
                np.nextafter(halves, np.float32(np.inf)),
                np.nextafter(halves, np.float32(-np.inf)),
                r.uniform(-300, 300, 16384) * s,
            ]
        ).astype(np.float32)
        # From 2^31 steps on, runtimes convert a float to int32 whose value is undefined in C.
        x[:6] = [0.0, -0.0, 2.0e9 * s, -2.0e9 * s, 1e-40, -1e-40]
        found.append(Case("quantize", (x.reshape(256, 256),), (), grid_of(s, z, y)))
    return found


def average_pool(x: str, *, same_grid: bool, seed: int = 7, padding: bool = True) -> Cases:
    """Windows of 2x2, 3x3, 7x7 and 2x3; 106,400 outputs at least (VALID ones fewer)."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for index, window in enumerate(((2, 2), (3, 3), (2, 3), (7, 7), (4, 4), (2, 2))):
        s_x, z_x = draw_scale(r, index), draw_zero_point(r, x)
        s_y, z_y = (s_x, z_x) if same_grid else (np.float32(s_x * r.uniform(0.3, 1.2)), draw_zero_point(r, x))
        known = {"window": window, "strides": (1, 1), "padding": "SAME" if padding and index != 1 else "VALID"}
        inputs = draw_codes(r, x, (2, 24, 24, 16))
        found.append(Case("average_pool", (inputs,), (grid_of(s_x, z_x, x),), grid_of(s_y, z_y, x), attributes=known))
    return found


def mean(x: str, *, same_grid: bool = False, seed: int = 8) -> Cases:
    """Means over height and width of 2x2 to 5x6; 12 cases of 8,192 outputs."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for index in range(12):
        s_x, z_x = draw_scale(r, index), draw_zero_point(r, x)
        s_y, z_y = (s_x, z_x) if same_grid else (np.float32(s_x * r.uniform(0.2, 1.2)), draw_zero_point(r, x))
        if index == 0:
            s_y = s_x
        size = (2, 3, 4, 5)[index % 4]
        inputs = draw_codes(r, x, (256, size, size + index % 2, 32))
        found.append(
            Case("mean", (inputs,), (grid_of(s_x, z_x, x),), grid_of(s_y, z_y, x), attributes={"axes": (1, 2)})
        )
    return found


def table(op: str, x: str, *, count: int = 40, near_ties: bool = False, seed: int = 9) -> Cases:
    """Every code of `x` under `count` input scales; TFLite fixes the output's grid, other runtimes accept it.

    near_ties: three scales of four put one code within two ulps of where the output lies between two codes.
    """
    r = np.random.RandomState(seed)
    info = np.iinfo(x)
    codes = np.arange(info.min, info.max + 1).astype(x).reshape(1, -1)
    scale, zero = (np.float32(1 / 256), info.min) if op == "logistic" else (np.float32(1 / 128), (info.min + 128) % 256)
    found: Cases = []
    for index in range(count):
        if near_ties and index % 4:
            s, z = draw_near_tie(r, op, x)
        else:
            s, z = np.float32(np.exp(r.uniform(-6, 0))), draw_zero_point(r, x)
        found.append(Case(op, (codes,), (grid_of(s, z, x),), grid_of(scale, int(zero), x)))
    return found


def softmax(*, seed: int = 10) -> Cases:
    """Rows of 2 to 100 int8 codes, near one another and far apart, 12 scales for each length; 324,816 outputs."""
    r = np.random.RandomState(seed)
    found: Cases = []
    for length in (2, 3, 5, 10, 17, 33, 64, 100):
        for index in range(12):
            s = np.float32(2.0 ** r.randint(-8, 2) if index % 3 == 0 else np.exp2(r.uniform(-9, 2)))
            spread = (2 / s, 5, 40, 100)[index % 4]
            values = r.normal(0, spread, (3360 // length + 1, length)) + r.randint(-50, 50)
            x = np.clip(np.rint(values), -128, 127).astype(np.int8)
            grid = grid_of(s, draw_zero_point(r, "int8"), "int8")
            found.append(Case("softmax", (x,), (grid,), grid_of(np.float32(1 / 256), -128, "int8")))
    return found


def softmax_on_any_grid(dtype: str, *, seed: int = 11) -> Cases:
    """Rows of 2 to 200 codes, whose results have scales from 1/100 down to 1/(100 n), and any zero point."""
    r = np.random.RandomState(seed)
    info = np.iinfo(dtype)
    found: Cases = []
    for length in (2, 3, 5, 10, 17, 33, 64, 100, 200):
        for index in range(12):
            s = np.float32(2.0 ** r.randint(-8, 2) if index % 3 == 0 else np.exp2(r.uniform(-9, 2)))
            spread = (2 / s, 5, 40, 100)[index % 4]
            values = r.normal(0, spread, (3360 // length + 1, length)) + r.randint(-50, 50) + info.min + 128
            x = np.clip(np.rint(values), info.min, info.max).astype(dtype)
            grid = grid_of(s, draw_zero_point(r, dtype), dtype)
            scale = (1 / 256, 1 / 255, r.uniform(0.003, 0.01), 1 / (100 * length))[(index + length) % 4]
            zero_point = info.min if index % 2 else draw_zero_point(r, dtype)
            found.append(Case("softmax", (x,), (grid,), grid_of(np.float32(scale), zero_point, dtype)))
    return found
