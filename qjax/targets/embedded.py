"""Targets of microcontrollers and accelerators: CMSIS-NN, NVDLA and TOSA."""

from qjax.numerics.rounding import Rounding
from qjax.targets.base import Target, register
from qjax.targets.tflite import TFLITE_MICRO

CMSIS_NN = register(
    TFLITE_MICRO.replace(
        name="cmsis_nn",
        lstm=None,
        svdf=None,
        description="CMSIS-NN as TFLite Micro builds it: arm_nn_requantize, gemmlowp's two roundings",
    )
)

NVDLA = register(
    Target(
        "nvdla",
        "nvdla",
        Rounding.NEAREST_AWAY,
        multiply="nvdla",
        matmul="nvdla",
        rescale="nvdla",
        wide_activations=True,
        description="NVDLA's output converter: scales of 15 bits, one rounding, ties away from zero",
    )
)

TOSA = register(
    Target(
        "tosa",
        "tosa_single",
        Rounding.NEAREST_UP,
        add="tosa_add",
        subtract="tosa_add",
        multiply="tosa_single",
        matmul="tosa_single",
        rescale="tosa_single",
        mean="tosa_single",
        average_pool="tosa_average_pool",
        same_grid=frozenset({"average_pool"}),
        wide_activations=True,
        description="TOSA 1.0 RESCALE with SINGLE_ROUND: apply_scale_32, one rounding, ties up",
    )
)
