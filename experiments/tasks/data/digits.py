"""Scikit-learn's digits: 1797 images of 8 x 8 pixels, installed with scikit-learn."""

from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import Dataset

SPLIT_SEED = 0
TEST_EXAMPLES = 360


def load_digits(data: Path | None) -> Dataset:
    """1437 training and 360 test images, uint8[..., 8, 8, 1] from 0 to 16.

    The split is stratified and the same for all seeds.
    """
    if data is not None:
        raise ExperimentError(
            "--dataset digits is installed with scikit-learn and takes no --data."
        )
    from sklearn import datasets, model_selection  # Takes a second to load.

    images, labels = datasets.load_digits(return_X_y=True)
    train_inputs, test_inputs, train_labels, test_labels = model_selection.train_test_split(
        images.reshape(-1, 8, 8, 1).astype(np.uint8),
        labels.astype(np.int32),
        test_size=TEST_EXAMPLES,
        stratify=labels,
        random_state=SPLIT_SEED,
    )
    return Dataset(train_inputs, train_labels, test_inputs, test_labels)
