"""What is built on the core and that the core does not know: each part registers where the core has a hook.

- `importers`: turns pre-quantized .tflite and .onnx files into graphs (`qjax.read`).
- `float_models`: float .onnx and .tflite files as modules (`qjax.from_onnx`, `qjax.from_tflite`).
- `gguf`: language models in the files of llama.cpp (`qjax.gguf`).
- `profiles`: the requirements of devices (`qjax.profiles`, `Recipe(profile=...)`).
- `post_training`: the steps of `qjax.post_training`, such as GPTQ and AdaRound (names of `qjax.training`).
- `learned_bits`: bits that training chooses, and bounds of accumulators (names of `qjax.training`).
- `linen`, `haiku`: modules of Flax Linen (`qjax.from_linen`), and layers within functions of Haiku.
- `keras`: wraps Keras models (`qjax.from_keras`) and trains them the Keras way (`qjax.to_keras`).
- `onnx_styles`: .onnx files for OpenVINO, and for FINN, hls4ml and other readers of QONNX.
- `simd`: emitted C with the vectors of x86-64, AArch64 and Cortex-M (`simd=` of the emitter).
- `rtl`: the emitter of Verilog, and Icarus Verilog as a runtime.
- `executorch`: the emitter of .pte files, and ExecuTorch as a runtime.
- `lab`: tools for studies (`qjax.lab`).

Nothing is imported before it is used.
"""

from qjax.runtimes import Runtime, register_runtime
from qjax.support.extensions import (
    register_around_functions,
    register_emitter,
    register_names,
    register_profiles,
    register_style,
    register_vectors,
)

register_emitter("pte", "qjax.contrib.executorch")
register_emitter("rtl", "qjax.contrib.rtl")
register_vectors(False, "qjax.contrib.simd")
register_vectors(True, "qjax.contrib.simd")
register_vectors("cortex_m", "qjax.contrib.simd")
register_style("openvino", "qjax.contrib.onnx_styles.openvino", "openvino_cpu")
register_style("qonnx", "qjax.contrib.onnx_styles.qonnx")
register_around_functions("qjax.contrib.haiku")
register_profiles("qjax.contrib.profiles.requests")
register_names("qjax.training", "qjax.contrib.learned_bits")
register_names("qjax.training", "qjax.contrib.post_training")

register_runtime(
    "executorch",
    Runtime(
        "qjax.contrib.executorch.runtime",
        "",
        "ExecuTorch's XNNPACK delegate on a .pte",
        ("executorch_xnnpack",),
        packages=("executorch",),
        install="python -m pip install executorch",
    ),
)
register_runtime(
    "verilog",
    Runtime(
        "qjax.contrib.rtl.verilog",
        "",
        "Icarus Verilog on the emitted Verilog",
        packages=("alkaid",),
        programs=("iverilog",),
        install='python -m pip install "qjax-quant[rtl]", and iverilog from the system\'s packages',
    ),
)
