"""The end of a chain: computes codes from an accumulator, with the scale and zero point of the result."""

from qjax.ops.base import Elementwise, Role, register
from qjax.ops.fields import NoFields


@register
class Quantize(Elementwise):
    """A node of the quantized graph that `assign` folds into its producer; tracing never reads an equation as one."""

    name = "quantize"
    fields = NoFields
    role = Role.QUANTIZER
