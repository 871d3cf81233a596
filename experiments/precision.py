"""Which layers of a digits network to leave in higher precision: `python -m experiments.precision`.

Trains the network in float32, quantizes it after training, and prints three tables: what each layer costs alone, what
each tensor looks like, and the bits that a search gives each layer within a size.
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.data import digits
from experiments.models import CNN, ResNet
from experiments.training import Schedule, accuracy, one_hot, scores, train

NETWORKS = {"cnn": CNN, "resnet": ResNet}


def main(argv: list[str] | None = None) -> qjax.analysis.SearchResult:
    parser = argparse.ArgumentParser(prog="python -m experiments.precision", description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the float training")
    parser.add_argument("--bits", type=int, default=3, help="of weights and activations in the first two tables")
    parser.add_argument("--size", type=float, default=6000, help="bytes of weights that the search may use")
    parser.add_argument("--out", type=Path, default=Path("out/precision"), help="folder for JSON files and pictures")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)

    # Bits are chosen on images that the training did not see; the test images judge the result.
    data = digits()
    split = data.validation()
    model = NETWORKS[args.network](rngs=nnx.Rngs(0))
    train(model, split.train_images, one_hot(split.train_labels), Schedule(args.epochs), seed=0)
    print(f"float: accuracy {accuracy(scores(model, data.test_images), data.test_labels):.3f} on the test images\n")
    sample = split.train_images[:64]
    calibration = [split.train_images[i : i + 256] for i in range(0, 768, 256)]
    batches = [(split.test_images, split.test_labels)]

    def inputs(batch):
        return batch[0]

    def loss(output, batch):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(output, jnp.asarray(batch[1])))

    def metric(output, batch):
        return np.mean(np.argmax(np.asarray(output), -1) == batch[1])

    recipe = recipe_of(args.bits)
    qmodel = qjax.quantize(model, recipe, sample)
    qjax.calibrate(qmodel, calibration)
    sensitivity = qjax.sensitivity(qmodel, batches, inputs=inputs, loss=loss, metric=metric)
    print(f"{sensitivity}\n")
    statistics = qjax.statistics(qmodel, batches, inputs=inputs)
    print(f"{statistics}\n")

    found = qjax.search(
        model,
        recipe_of(8),
        sample,
        batches,
        budget=qjax.Budget(size=args.size),
        candidates=(2, 3, 4, 5, 6, 8),
        calibration=calibration,
        inputs=inputs,
        loss=loss,
        metric=metric,
    )
    print(f"{found}\n")
    for name, chosen in (
        ("the search's bits", found.recipe),
        ("3 bits everywhere", recipe_of(8, weights=3)),
    ):
        qmodel = qjax.quantize(model, chosen, sample)
        qjax.calibrate(qmodel, calibration)
        qmodel.eval()
        print(f"{name}: accuracy {accuracy(scores(qmodel, data.test_images), data.test_labels):.3f} on the test images")
    for name, report in (("sensitivity", sensitivity), ("statistics", statistics), ("search", found)):
        (args.out / f"{name}.json").write_text(json.dumps(json.loads(report.to_json()), indent=2) + "\n")
    sensitivity.plot(args.out / "sensitivity.png")
    found.plot(args.out / "search.png")
    return found


def recipe_of(bits: int, weights: int | None = None) -> qjax.Recipe:
    """Weights and activations of these bits, the first and the last layer included."""
    return qjax.Recipe(
        weights=qjax.QSpec(bits=weights or bits, axis=-1), activations=qjax.QSpec(bits=bits, symmetric=False)
    )


if __name__ == "__main__":
    main()
