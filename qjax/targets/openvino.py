"""The target of OpenVINO's CPU plugin, for the files that qjax writes for it."""

from qjax.targets.base import Target, Weighted, register

OPENVINO_CPU = register(
    Target(
        "openvino_cpu",
        Weighted("openvino"),
        add="openvino_add",
        subtract="openvino_add",
        multiply="float32",
        rescale="float32",
        mean="float32",
        average_pool="float32",
        wide_weights=False,
        description="OpenVINO's CPU plugin on qjax's files, x86 with VNNI: float32 product and bias, one rounding",
    )
)
