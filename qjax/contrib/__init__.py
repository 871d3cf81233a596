"""What is built on the core and that the core does not know: each part registers where the core has a hook.

- `importers`: turns pre-quantized .tflite and .onnx files into graphs (`qjax.read`).
- `float_models`: float .onnx and .tflite files as modules (`qjax.from_onnx`, `qjax.from_tflite`).
- `gguf`: language models in the files of llama.cpp (`qjax.gguf`).
- `keras`: wraps Keras models (`qjax.from_keras`) and trains them the Keras way (`qjax.to_keras`).
- `rtl`: the emitter of Verilog, and Icarus Verilog as a runtime.
- `executorch`: the emitter of .pte files, and ExecuTorch as a runtime.
- `lab`: tools for studies (`qjax.lab`).

Nothing is imported before it is used.
"""

from qjax.runtimes import Runtime, register_runtime
from qjax.support.extensions import register_emitter

register_emitter("pte", "qjax.contrib.executorch")
register_emitter("rtl", "qjax.contrib.rtl")

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
