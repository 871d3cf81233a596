"""What is done with a trained float model: nothing, post-training quantization, and the trainings."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.accuracy.data import Data
from experiments.accuracy.train import BATCH, fit, steps_of
from qjax.training import Distillation, Oscillations

CALIBRATION = 1024
"""Training images that calibrate."""
SCALE_RATE = 1.0
"""Rate of scales, as a multiple of the weights' (`qjax.training.optimizer`)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Bits of weights and activations; the first and the last layer have 8."""

    weights: int
    activations: int

    def recipe(self, **options: Any) -> qjax.Recipe:
        """The recipe: weights per channel, activations per tensor."""
        return qjax.Recipe(
            weights=qjax.QSpec(bits=self.weights, axis=-1),
            activations=qjax.QSpec(bits=self.activations, symmetric=False),
            first_last_bits=8,
            **options,
        )


SETTINGS = {f"W{w}A{a}": Setting(w, a) for w, a in ((8, 8), (4, 8), (4, 4), (3, 3), (2, 8), (2, 2))}
"""Name -> setting. Weights of 2 bits are ternary: symmetric, -1, 0, 1."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What every method starts from. model: the float model, trained; not to be changed."""

    model: Any
    data: Data
    setting: Setting | None
    epochs: int
    seed: int
    rate: float

    @property
    def steps(self) -> int:
        return steps_of(self.data.train_images, self.epochs)

    def batches(self) -> list[np.ndarray]:
        """What calibrates."""
        x = self.data.train_images[:CALIBRATION]
        return [x[i : i + BATCH] for i in range(0, len(x) // BATCH * BATCH, BATCH)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """model: in evaluation mode; quantized or not. loss: of the last epoch. run: images -> class scores, of a model
    that is not one of Flax."""

    model: Any = None
    loss: float | None = None
    run: Callable[[np.ndarray], np.ndarray] | None = None


def calibrated(start: Start, **options: Any) -> Any:
    """The float model, quantized and calibrated."""
    assert start.setting is not None
    batches = start.batches()
    qmodel = qjax.quantize(start.model, start.setting.recipe(**options), batches[0])
    qjax.calibrate(qmodel, batches, progress=False)
    qmodel.eval()
    return qmodel


def fitted(start: Start, model: Any, optimizer: optax.GradientTransformation, **options: Any) -> Outcome:
    """The model after the epochs; options: see `train.fit`."""
    images, labels = start.data.train_images, start.data.train_labels
    losses, _ = fit(model, images, labels, optimizer, epochs=start.epochs, seed=start.seed, **options)
    return Outcome(model, losses[-1])


def adam(start: Start) -> optax.GradientTransformation:
    """For models without learned scales: a third of the float training's rate, falling as a cosine."""
    return optax.adam(optax.cosine_decay_schedule(start.rate / 3, start.steps))


def trained_on(start: Start) -> Outcome:
    """The control: the float model after the epochs that quantized training gets."""
    return fitted(start, nnx.clone(start.model), adam(start))


def calibration_alone(start: Start) -> Outcome:
    return Outcome(calibrated(start))


def post_trained(start: Start) -> Outcome:
    """The steps of `qjax.post_training`."""
    assert start.setting is not None
    qmodel = qjax.post_training(start.model, start.setting.recipe(), start.batches())
    qmodel.eval()
    return Outcome(qmodel)


def learned(start: Start, *, scale_rate: float = SCALE_RATE, frozen_norms: bool = False, **options: Any) -> Outcome:
    """Quantization-aware training on the labels."""
    qmodel = calibrated(start, **options)
    optimizer = qjax.training.optimizer(qmodel, start.steps, scale_rate=scale_rate)
    return fitted(start, qmodel, optimizer, frozen_norms=frozen_norms)


def distilled(start: Start, **options: Any) -> Outcome:
    """The labels and the float model's probabilities, half and half."""
    qmodel = calibrated(start, **options)
    teacher = Distillation.start(qmodel, start.batches()[0], teacher=start.model, measure="classes")

    def loss(model: Any, teacher: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        wanted, _ = teacher.teach(images)
        class_scores = model(images)
        soft = optax.softmax_cross_entropy(class_scores, jax.nn.softmax(wanted)).mean()
        hard = optax.softmax_cross_entropy_with_integer_labels(class_scores, labels).mean()
        return 0.5 * soft + 0.5 * hard

    optimizer = qjax.training.optimizer(qmodel, start.steps, scale_rate=SCALE_RATE)
    return fitted(start, qmodel, optimizer, loss=loss, extra=teacher)


def frozen_oscillations(start: Start) -> Outcome:
    """Weights that turn too often are held: the threshold falls from 0.04 to 0.01 as a cosine (arXiv 2203.11086)."""
    qmodel = calibrated(start)
    follow = Oscillations.start(qmodel, start.batches()[0])

    def after(model: Any, follow: Any, progress: jax.Array) -> Any:
        threshold = 0.01 + 0.03 * 0.5 * (1 + jax.numpy.cos(np.float32(np.pi) * progress))
        return follow.update(model).freeze(model, threshold)

    optimizer = qjax.training.optimizer(qmodel, start.steps, scale_rate=SCALE_RATE)
    return fitted(start, qmodel, optimizer, extra=follow, after=after)


def qwix_trained(start: Start) -> Outcome:
    """qwix's quantized training: ranges of every batch, no learned scales; everything but the first layer's input."""
    import qwix  # pyright: ignore[reportMissingImports]

    assert start.setting is not None
    names = (start.setting.weights, start.setting.activations)
    rules = [
        qwix.QuantizationRule(module_path="stem|head|embed|body/layers/0", weight_qtype="int8", act_qtype="int8"),
        qwix.QuantizationRule(module_path=".*", weight_qtype=f"int{names[0]}", act_qtype=f"int{names[1]}"),
    ]
    model = nnx.clone(start.model)
    model.eval()
    quantized: Any = qwix.quantize_model(model, qwix.QtProvider(rules), start.batches()[0])
    return fitted(start, quantized, adam(start))


def brevitas_trained(start: Start, weights: str) -> Outcome:
    """Brevitas: learned scales of activations; those of weights follow the greatest weight, or are learned too."""
    from brevitas.quant import Int8WeightPerChannelFloat  # pyright: ignore[reportMissingImports]

    from experiments.accuracy import brevitas_peer

    kinds = {"greatest": Int8WeightPerChannelFloat, "learned": brevitas_peer.LearnedWeightScales}
    return Outcome(run=brevitas_peer.trained(start, kinds[weights]))


METHODS: dict[str, Callable[[Start], Outcome]] = {
    "float, trained on": trained_on,
    "calibration": calibration_alone,
    "post_training": post_trained,
    "LSQ": learned,
    "LSQ, others 8 bits": functools.partial(learned, other_bits=8),
    "LSQ+": functools.partial(learned, method="lsq_plus"),
    "PACT": functools.partial(learned, method="pact"),
    "TQT": functools.partial(learned, method="tqt", weight_method="tqt"),
    "constant scales": functools.partial(learned, method="static", weight_method="static"),
    "constant scales, others 8 bits": functools.partial(learned, method="static", weight_method="static", other_bits=8),
    "LSQ, distilled": distilled,
    "LSQ, distilled, others 8 bits": functools.partial(distilled, other_bits=8),
    "LSQ, frozen norms": functools.partial(learned, frozen_norms=True),
    "LSQ, frozen oscillations": frozen_oscillations,
    "qwix": qwix_trained,
    "Brevitas": functools.partial(brevitas_trained, weights="greatest"),
    "Brevitas, learned scales": functools.partial(brevitas_trained, weights="learned"),
}
"""Name -> method; "float" itself is the row that all start from."""
PEERS = ("qwix", "Brevitas", "Brevitas, learned scales")
"""Other libraries, which `make rivals` installs. Brevitas needs an environment with torch too."""
UNTRAINED = ("calibration", "post_training")
"""Those without epochs."""
OURS = tuple(name for name in METHODS if name not in (*PEERS, "float, trained on"))
"""Those whose result is a quantized model that converts."""
