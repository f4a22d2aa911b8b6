"""CIFAR-10, binary version: one byte of label, then 3 x 32 x 32 bytes of red, green and blue."""

from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import Dataset, read_bytes, require_examples, require_folder

RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
CONTENTS = "data_batch_1.bin to data_batch_5.bin and test_batch.bin"


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8[images, 32, 32, 3] and int32[images] of one file.

    Raises:
      ExperimentError: If the file is missing or truncated, or has a label above 9.
    """
    if not path.is_file():
        raise ExperimentError(f"{path} is missing.")
    raw = read_bytes(path)
    if not raw or len(raw) % RECORD_BYTES:
        raise ExperimentError(
            f"{path} is truncated or not a binary batch of CIFAR-10: {len(raw)} bytes, not a "
            f"multiple of {RECORD_BYTES}."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() > 9:
        raise ExperimentError(f"{path} holds the label {labels.max()}; labels are 0 to 9.")
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, labels.astype(np.int32)


def load_cifar10(data: Path | None) -> Dataset:
    """All training batches and the test batch in a folder."""
    folder = require_folder(data, "cifar10", CONTENTS)

    def read(files: tuple[str, ...]) -> list[np.ndarray]:
        batches = [read_batch(folder / name) for name in files]
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    return require_examples(Dataset(*read(TRAIN_FILES), *read(TEST_FILES)), folder)
