"""The networks by name: name -> a function that makes it."""

from collections.abc import Callable

from experiments.real.network import Network
from experiments.real.networks import crepe, efficientnet, minilm, mtcnn, silero

NETWORKS: dict[str, Callable[[], Network]] = {
    "efficientnet-lite0": efficientnet.network,
    "crepe-tiny": crepe.network,
    "mtcnn-rnet": mtcnn.rnet,
    "mtcnn-onet": mtcnn.onet,
    "silero-vad": silero.network,
    "minilm": minilm.network,
}
