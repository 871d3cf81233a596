"""Graphs as .tflite files in LiteRT's kernels for AArch64: whole models, as the runtime fuses them."""

import numpy as np
import pytest

import qjax
from conformance.runtimes.litert_arm import LiteRTArm
from qjax.export.emit.tflite import to_bytes
from tests.export.emit.tflite_runtimes import random_codes
from tests.layers.round_trip import data
from tests.targets.test_every_target import Network, recipe_of

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def graph():
    x = data(8, 6, 6, 2)
    qmodel = qjax.quantize(Network(normalized=True), recipe_of("tflite_micro"), x)
    qmodel.eval()
    return qjax.convert(qmodel, x)


@pytest.mark.parametrize(("mode", "target"), [("optimized", "tflite_optimized_arm"), ("xnnpack", "tflite_xnnpack_arm")])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_network_is_the_runtimes(graph, mode, target, batch):
    there = graph.retarget(target)
    codes = random_codes(there.ir, batch)
    wanted = np.asarray(there.run(*codes))
    got = LiteRTArm(mode).run_model(to_bytes(there.ir, batch=batch), codes)
    np.testing.assert_array_equal(got, wanted)
    assert len(np.unique(wanted)) > 2 * (batch > 1)
