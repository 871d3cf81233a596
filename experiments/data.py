"""The handwritten digits that scikit-learn ships: 1,797 images of 8 x 8 pixels, no download."""

import dataclasses

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES = 10
TEST_IMAGES = 500


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images float32 [n, 8, 8, 1] in [0, 1]; labels int32 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def validation(self, images: int = 300) -> "Digits":
        """The training images alone, the last of them in the place of the test split: for choosing settings."""
        x, y = self.train_images, self.train_labels
        return Digits(x[:-images], y[:-images], x[-images:], y[-images:])


def digits(seed: int = 0) -> Digits:
    """1,297 images to train on and 500 to test with; every class has the same share of both.

    The seed chooses the split, and nothing else does: all experiments that name the same seed are judged by the same
    500 images.
    """
    pixels, classes = load_digits(return_X_y=True)
    images = (np.asarray(pixels).reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    labels = np.asarray(classes).astype(np.int32)
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_IMAGES, stratify=labels, random_state=seed)
    train, test = np.asarray(train), np.asarray(test)
    return Digits(images[train], labels[train], images[test], labels[test])
