"""Silero VAD, a small CNN and an LSTM that detect speech, from silero-vad."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from flax import nnx

from experiments.real import data, weights
from experiments.real.network import Network, Outputs, batched, built, loaded, put, put_conv

FILE = ("silero_vad", "data", "silero_vad_16k_op15.onnx")
CHUNK, CONTEXT = 512, 64
STEPS = 24
"""Chunks of one example: 0.77 seconds."""


class Silero(nnx.Module):
    """Audio [n, steps, 576], 512 samples behind the last 64 of the chunk before, to the probability of speech."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stft = nnx.Conv(1, 258, (256,), 128, padding="VALID", use_bias=False, rngs=rngs)
        shapes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.convs = nnx.List(nnx.Conv(i, o, (3,), stride, padding=((1, 1),), rngs=rngs) for i, o, stride in shapes)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(128, 128, rngs=rngs))
        self.head = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        n, steps, size = x.shape
        x = x.reshape(n * steps, size)
        x = jnp.concatenate([x, x[:, -2:-66:-1]], axis=1)  # 64 samples reflected
        x = self.stft(x[:, :, None])
        x = jnp.sqrt(x[..., :129] ** 2 + x[..., 129:] ** 2)
        for conv in self.convs:
            x = nnx.relu(conv(x))
        start = jnp.zeros((n, 128)), jnp.zeros((n, 128))  # the cell's own start draws from its random numbers
        hidden: Any = self.lstm(x.reshape(n, steps, 128), initial_carry=start)
        return nnx.sigmoid(self.head(nnx.relu(hidden)))[..., 0]


def load() -> Silero:
    """The network with its public weights. Those of the package's safetensors file are of another version."""
    initializers = onnx.load(weights.file(*FILE)).graph.initializer
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in initializers}
    model = built(Silero)
    put(model.stft.kernel, tensors["model.stft.forward_basis_buffer"].transpose(2, 1, 0))
    for index, conv in enumerate(model.convs):
        put_conv(conv, tensors, f"model.encoder.{index}.reparam_conv", (2, 1, 0))
    cell: Any = model.lstm.cell
    put(cell.dense_i.kernel, tensors["model.decoder.rnn.weight_ih"].T)
    put(cell.dense_h.kernel, tensors["model.decoder.rnn.weight_hh"].T)
    put(cell.dense_h.bias, tensors["model.decoder.rnn.bias_ih"] + tensors["model.decoder.rnn.bias_hh"])
    put(model.head.kernel, tensors["model.decoder.decoder.2.weight"][..., 0].T)
    put(model.head.bias, tensors["model.decoder.decoder.2.bias"])
    return loaded(model)


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Audio of every chunk with the context before it, [n, steps, 576], and whether it is mostly speech."""
    recording = data.speech()
    count = len(recording.samples) // CHUNK
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), recording.samples])
    chunks = np.stack([padded[i * CHUNK : i * CHUNK + CONTEXT + CHUNK] for i in range(count)])
    speaking = recording.speaking[: count * CHUNK].reshape(count, CHUNK).mean(axis=1) > 0.5
    whole = count // STEPS * STEPS
    return chunks[:whole].reshape(-1, STEPS, CONTEXT + CHUNK), speaking[:whole].reshape(-1, STEPS)


def network() -> Network:
    x, speaking = examples()
    # Every third example calibrates: silence and speech are in both parts.
    chosen = np.arange(len(x)) % 3 == 0
    held_out = speaking[~chosen][: len(batched(4, x[~chosen])) * 4]

    def score(outputs: Outputs, _: Outputs) -> float:
        # the first chunks of an example have no past
        return 100 * float(np.mean(((outputs[0] > 0.5) == held_out)[:, 4:]))

    return Network(
        name="silero-vad",
        kind="CNN and LSTM, audio",
        source="silero-vad 6.2.3, " + FILE[-1],
        model=load(),
        calibration=batched(4, x[chosen]),
        test=batched(4, x[~chosen]),
        measure="chunks classified correctly as speech or not",
        score=score,
    )
