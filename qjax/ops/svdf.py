"""SVDF, a filter over the last frames of a sound, from files of other tools: its features, and their sum over time.

SVDF is a product of low rank over time: each filter computes one number per frame, stores the last ones as its state,
and weights them; a unit adds the filters of its rank. Separate nodes shift the state.

| method | who | features | sums over time |
| --- | --- | --- | --- |
| `tflite` | LiteRT, TFLite Micro | two roundings, clamped before the zero point is added | modulo 2^32, two roundings |
| `exact` | every other target | one rounding | one rounding; a sum beyond int32 is an error |

Scales are multiplied and divided in float32. Source: svdf.h of LiteRT, svdf_common.cc of tflite-micro.
"""

from collections.abc import Collection, Sequence
from typing import NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import wide
from qjax.numerics.fixed_point import Multiplier, quantize_multiplier
from qjax.numerics.requantize import requantize
from qjax.numerics.softfloat import Real
from qjax.ops import accumulate
from qjax.ops.accumulator_bounds import reach, span
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Op,
    Preparation,
    Prepared,
    Role,
    Shape,
    Site,
    centered,
    register,
)
from qjax.ops.epilogue import finish_sum, fold_sum
from qjax.ops.facts import always
from qjax.ops.fields import NoFields
from qjax.support.errors import Unsupported

_ROWS = (((1,), (0,)), ((), ()))


class PreparedFields(TypedDict):
    """method: see the module. rounding: of the exact one."""

    method: str
    rounding: NotRequired[str]


class _Filter(Op):
    """What both share. constants: kernel holds codes; a quantized graph adds scale (float32), sums add bias (int32)."""

    fields = NoFields
    prepared = PreparedFields
    role = Role.PRODUCER
    takes_steps = False
    keeps_batch = always
    keeps = ("kernel", "bias")

    def prepare(self, given: Preparation) -> Prepared:
        x, y, held, method = given.inputs[0], given.output, given.constants, given.target.svdf
        if method is None:
            raise Unsupported(
                f"SVDF has a kernel of its own under {given.target.name!r}, which qjax does not reproduce",
                "Use another target",
            )
        scales = [np.float32(np.asarray(scale)) for scale in (x.scale, held["scale"], y.scale)]
        own = {role: held[role] for role in self.keeps if role in held}
        if method == "exact":
            folded = fold_sum([Real.of(scales[0]) * Real.of(scales[1])], y.scale, given.affine)
            return Prepared(own | folded, {"method": method, "rounding": given.target.rounding.value})
        effective = np.float32(scales[0] * scales[1]) / scales[2]
        return Prepared(own | quantize_multiplier(Real.of(effective))._asdict(), {"method": method})

    def restated(self, given: Preparation) -> Prepared | None:
        if "scale" not in given.constants:
            raise Unsupported("the scale of the weights of SVDF is not in the graph", "Read the file again")
        return self.prepare(given)

    def arithmetic(self, attributes: Attributes) -> str:
        return f"SVDF of {attributes['method']}"


@register
class SvdfFeature(_Filter):
    """One number for each filter: codes (batch, in) times kernel (in, filters), on the grid of the state."""

    name = "svdf_feature"

    def accumulator(self, site: Site) -> Bounds | None:
        w, (low, high) = np.asarray(site.constants["kernel"], np.int64), span(site.inputs[0])
        least = w.clip(min=0).sum(0) * low + w.clip(max=0).sum(0) * high
        most = w.clip(min=0).sum(0) * high + w.clip(max=0).sum(0) * low
        return int(least.min()), int(most.max())

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[1]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        acc = accumulate.dot(centered(inputs[0], constants, 0), jnp.asarray(constants["kernel"]), _ROWS)
        if attributes["method"] == "exact":
            return finish_sum([acc], constants, attributes)
        low, high = np.int32(attributes["qmin"]), np.int32(attributes["qmax"])
        codes = jnp.clip(_multiplied(acc, constants), low, high) + jnp.asarray(constants["y_zero_point"])
        # The sum is stored in the state's type, even if this loses bits.
        span_of_type = high - low
        return (((codes - low) & span_of_type) + low).astype(attributes["dtype"])


@register
class SvdfTime(_Filter):
    """The sum over the states (batch, filters, memory) of each unit, times kernel (units, rank * memory), plus bias."""

    name = "svdf_time"

    def accumulator(self, site: Site) -> Bounds | None:
        if site.attributes["method"] == "tflite":
            # summed in 64 bits, of which the low 32 are used
            return None
        most = np.abs(np.asarray(site.constants["kernel"], np.int64)).sum(axis=1) * reach(site.inputs[0])
        most = most + np.abs(np.asarray(site.constants["bias"], np.int64))
        return -int(most.max()), int(most.max())

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[1, 2]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        kernel, bias = jnp.asarray(constants["kernel"]), jnp.reshape(jnp.asarray(constants["bias"]), (1, -1))
        units, summed = kernel.shape
        state = jnp.reshape(centered(inputs[0], constants, 0), (-1, units, summed))
        with wide(jnp):
            products = state.astype(jnp.int64) * jnp.expand_dims(kernel, 0).astype(jnp.int64)
            total = jnp.sum(products, axis=2, dtype=jnp.int64) + bias.astype(jnp.int64)
            # XLA may saturate a conversion that loses bits, so the low 32 are selected first.
            low = (total + np.int64(2**31)) & np.int64(2**32 - 1)
            acc = (low - np.int64(2**31)).astype(jnp.int32)
        if attributes["method"] == "exact":
            return finish_sum([acc], constants, attributes)
        codes = _multiplied(acc, constants) + jnp.asarray(constants["y_zero_point"])
        return jnp.clip(codes, np.int32(attributes["qmin"]), np.int32(attributes["qmax"])).astype(attributes["dtype"])


def _multiplied(acc: jax.Array, constants: Constants) -> jax.Array:
    """MultiplyByQuantizedMultiplier."""
    m = Multiplier(jnp.asarray(constants["multiplier"]), jnp.asarray(constants["shift"]))
    return requantize(acc, m, rule="double_round", qmin=-(2**30), qmax=2**30).astype(jnp.int32)
