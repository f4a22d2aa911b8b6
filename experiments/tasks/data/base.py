"""The type of datasets, and functions that all readers of files use."""

import gzip
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from experiments.cli.errors import ExperimentError


class Dataset(NamedTuple):
    """Examples and labels. Inputs have the stored dtype; models scale them."""

    train_inputs: np.ndarray  # uint8[examples, ...], or int32 for indices
    train_labels: np.ndarray  # int32[examples, ...]
    test_inputs: np.ndarray
    test_labels: np.ndarray
    sizes: tuple[int, ...] = ()  # Number of words, or of users and items.


MAX_BYTES = 2**30
MAX_PARSED_BYTES = 2**27
"""Of a file whose words or lines become Python objects, which take up to 40 times its bytes."""
PART = 2**20  # Bytes of one read.

VALIDATION_PART = 0.2
SPLIT_SEED = 0


def split_at_random(
    inputs: np.ndarray, labels: np.ndarray, part: float, sizes: tuple[int, ...] = ()
) -> Dataset:
    """A dataset whose test set is a random part. The split is the same for all seeds."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(inputs))
    count = round(part * len(order))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    return Dataset(inputs[train], labels[train], inputs[test], labels[test], sizes)


def hold_out(dataset: Dataset) -> Dataset:
    """Holds out a random fifth of the training set, which replaces the test set."""
    return split_at_random(
        dataset.train_inputs, dataset.train_labels, VALIDATION_PART, dataset.sizes
    )


def require_file(file: Path | None, dataset: str, contents: str) -> Path:
    """Returns the file if it exists."""
    if file is None:
        raise ExperimentError(f"--dataset {dataset} needs --data FILE, {contents}.")
    if not file.is_file():
        raise ExperimentError(f"--data {file} is not a file; {dataset} needs {contents}.")
    return file


def require_folder(folder: Path | None, dataset: str, contents: str) -> Path:
    """Returns the folder if it exists."""
    if folder is None:
        raise ExperimentError(f"--dataset {dataset} needs --data DIR, a folder with {contents}.")
    if not folder.is_dir():
        raise ExperimentError(f"--data {folder} is not a folder; {dataset} needs {contents}.")
    return folder


def read_start(path: Path, limit: int) -> bytes:
    """At most the first `limit` bytes of a file, decompressed if its name ends in `.gz`.

    Raises:
      ExperimentError: If the file cannot be read, or the part that is read is not valid gzip.
    """
    raw = bytearray()
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            while part := file.read(min(PART, limit - len(raw))):
                raw += part
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ExperimentError(f"{path} is not a complete gzip file: {error}.") from error
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {error.strerror}.") from error
    return bytes(raw)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The contents of a file, decompressed if its name ends in `.gz`.

    Args:
      path: The file.
      limit: The most bytes. Default: `MAX_BYTES`.

    Raises:
      ExperimentError: If the file cannot be read, or has more bytes, which a small gzip file may.
    """
    limit = MAX_BYTES if limit is None else limit
    raw = read_start(path, limit + 1)
    if len(raw) > limit:
        raise ExperimentError(f"{path} holds more than {limit} bytes.")
    return raw


def read_text(file: Path | None, dataset: str, limit: int | None = None) -> bytes:
    """The contents of a plain-text file; by default the topics of Python's `help()`.

    The topics differ slightly between versions of Python.
    """
    if file is None:
        return "\n".join(topics.values()).encode()
    return read_bytes(require_file(file, dataset, "a plain-text file"), limit)


def require_examples(dataset: Dataset, where: object) -> Dataset:
    """Returns the dataset if it has examples, and one label per input."""
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
