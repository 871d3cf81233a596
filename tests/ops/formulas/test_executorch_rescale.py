"""ExecuTorch's change of scale beside numpy's float32 steps."""

import numpy as np
import pytest

from tests.ops.formulas.onnx import Grids, clamp, grids
from tests.ops.formulas.torch import run

f32 = np.float32


@pytest.mark.parametrize("seed", range(12))
def test_rescale_is_float32_steps(seed):
    g = grids("int8", seed, inputs=1)
    codes = np.arange(-128, 128, dtype=np.int32) - np.int32(g.zero_points[0])
    real = codes.astype(f32) * g.scales[0] * (f32(1) / g.y_scale)
    assert real.dtype == f32
    want = clamp(np.clip(np.rint(real.astype(np.float64)), -(2**30), 2**30) + g.y_zero_point, g)
    np.testing.assert_array_equal(run("executorch_rescale", "rescale", (codes,), g), want)


def test_rescale_is_neither_that_of_litert_nor_those_of_onnx_runtime_and_pytorch():
    others = ("xnnpack_rescale", "onnx_rescale", "torch_rescale")
    differing = dict.fromkeys(others, 0)
    rng = np.random.default_rng(0)
    for zero_point in rng.integers(-128, 128, 200):
        s_x = f32(np.exp(rng.uniform(-6, 0)))
        g = Grids((s_x,), (int(zero_point),), s_x * f32(2.0) ** f32(rng.integers(-1, 3)), 7, "int8")
        codes = np.arange(-128, 128, dtype=np.int32) - np.int32(g.zero_points[0])
        mine = run("executorch_rescale", "rescale", (codes,), g)
        for name in others:
            # one code of each is enough
            if not differing[name]:
                differing[name] += int(np.sum(run(name, "rescale", (codes,), g) != mine))
        if all(differing.values()):
            break
    assert all(differing.values()), differing
