"""What a dataset is, and what all readers of files share."""

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.errors import ExperimentError


class Dataset(NamedTuple):
    """Examples and labels. Inputs stay as narrow as they were stored; models scale them."""

    train_inputs: np.ndarray  # uint8[examples, ...], or int32 where they are numbers of things
    train_labels: np.ndarray  # int32[examples, ...]
    test_inputs: np.ndarray
    test_labels: np.ndarray
    sizes: tuple[int, ...] = ()  # How many words, or users and items, there are.


MAX_BYTES = 2**30
PART = 2**20  # Read at a time.

VALIDATION_PART = 0.2
VALIDATION_SEED = 0


def hold_out(dataset: Dataset) -> Dataset:
    """The training set alone, a fifth of it drawn to take the place of the test set.

    The split is fixed, whatever the seed of a run.
    """
    order = np.random.default_rng(VALIDATION_SEED).permutation(len(dataset.train_inputs))
    count = round(VALIDATION_PART * len(order))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    inputs, labels = dataset.train_inputs, dataset.train_labels
    return Dataset(inputs[train], labels[train], inputs[test], labels[test], dataset.sizes)


def require_folder(folder: Path | None, dataset: str, contents: str) -> Path:
    """The folder, if there is one."""
    if folder is None:
        raise ExperimentError(f"--dataset {dataset} needs --data DIR, a folder with {contents}.")
    if not folder.is_dir():
        raise ExperimentError(f"--data {folder} is not a folder; {dataset} needs {contents}.")
    return folder


def read_start(path: Path, limit: int) -> bytes:
    """The first bytes of a file, `limit` at most, unpacked where its name ends in `.gz`.

    Raises:
      ExperimentError: If the file cannot be read, or is no gzip file as far as it is read.
    """
    raw = bytearray()
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            while part := file.read(min(PART, limit - len(raw))):
                raw += part
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ExperimentError(f"{path} is not a whole gzip file: {error}.") from error
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {error.strerror}.") from error
    return bytes(raw)


def read_bytes(path: Path) -> bytes:
    """The contents of a file, likewise.

    Raises:
      ExperimentError: If it cannot be read, or holds more than `MOST_BYTES`, as few bytes of gzip
        may.
    """
    raw = read_start(path, MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ExperimentError(f"{path} holds more than {MAX_BYTES} bytes.")
    return raw


def require_examples(dataset: Dataset, where: object) -> Dataset:
    """The dataset, if it can be trained on: as many labels as inputs, and some of each."""
    parts = {
        "training": (dataset.train_inputs, dataset.train_labels),
        "test": (dataset.test_inputs, dataset.test_labels),
    }
    for part, (inputs, labels) in parts.items():
        if len(inputs) != len(labels):
            raise ExperimentError(
                f"{where} holds {len(inputs)} {part} inputs but {len(labels)} labels."
            )
        if not len(inputs):
            raise ExperimentError(f"{where} holds no {part} examples.")
    return dataset
