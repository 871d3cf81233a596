"""STMicroelectronics: the Neural-ART accelerator of the STM32N6."""

from qjax.contrib.profiles.base import Profile, known, register
from qjax.contrib.profiles.rules import Source, activations, batch_of_one, static, weights
from qjax.contrib.profiles.scheme import Scheme, specs
from qjax.numerics.qspec import QSpec

PAGE = Source(
    "ST Neural-ART NPU, supported operators and limitations, ST Edge AI Core 3.0.0, r1.2",
    "https://stedgeai-dc.st.com/assets/embedded-docs/stneuralart_operator_support.html",
)
TABLE = Source("the table of operators on that page, which could not be read", PAGE.url, verified=False)

STM32_N6 = register(
    Profile(
        name="stm32_n6",
        title="STM32N6, Neural-ART",
        targets=("tflite_reference", "tflite_micro", "tflite_xnnpack"),
        weights=QSpec(bits=8, axis=-1),
        activations=QSpec(bits=8, symmetric=False),
        scheme=Scheme(specs("int8", (8,), symmetric=True, per_channel=True), specs("int8", (8,)), PAGE),
        format="tflite",
        options={"batch": 1, "int4": False},
        operators=(
            known(
                "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED LOGISTIC MAX_POOL_2D MEAN "
                "MUL PAD QUANTIZE RESHAPE SLICE SUB TANH TRANSPOSE",
                TABLE,
            ),
        ),
        rules=(
            activations({"int8"}, PAGE, cure="Use activations=QSpec(bits=8, symmetric=False)."),
            weights({"int8"}, PAGE, cure="Use weights=QSpec(bits=8, axis=-1)."),
            static(PAGE),
            batch_of_one(PAGE),
        ),
        otherwise="the operator runs on the Cortex-M55",
        proof="The scheme is ST's. Its table of operators could not be read, so the list is not verified. Its compiler "
        "is closed-source and was not run, and nothing ran on an STM32N6.",
    )
)
