"""IDX files, the format of MNIST and related datasets.

Two zero bytes, a byte for the type (8: unsigned bytes), a byte for the number of dimensions, each
dimension as a big-endian uint32, then the elements in row-major order.
"""

import math
from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import (
    MAX_BYTES,
    Dataset,
    read_start,
    require_examples,
    require_folder,
)

UNSIGNED_BYTES = 8
CONTENTS = "the four IDX files of MNIST, such as train-images-idx3-ubyte or ....gz"


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, gzipped or not.

    Raises:
      ExperimentError: If the file is not such an array of `dimensions` dimensions, is truncated, or
        is empty.
    """
    header = 4 + 4 * dimensions
    raw = read_start(path, header)
    expected = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if raw[:4] != expected:
        raise ExperimentError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions: it starts "
            f"with {raw[:4].hex() or 'nothing'}, not {expected.hex()}."
        )
    if len(raw) < header:
        raise ExperimentError(f"{path} is truncated: its header has {len(raw)} of {header} bytes.")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    if not 0 < math.prod(shape) <= MAX_BYTES:
        raise ExperimentError(
            f"{path} states the shape {shape}: it must hold 1 to {MAX_BYTES} bytes."
        )
    raw = read_start(
        path, header + math.prod(shape) + 1
    )  # One more byte detects a file that is too long.
    if (actual := len(raw) - header) != math.prod(shape):
        fault = "too long" if actual > math.prod(shape) else f"truncated: {actual} bytes"
        raise ExperimentError(f"{path} is {fault} for the shape {shape} it states.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _find(folder: Path, name: str) -> Path:
    candidates = [folder / name, folder / f"{name}.gz"]
    for path in candidates:
        if path.is_file():
            return path
    raise ExperimentError(f"{candidates[0]} is missing, and so is {candidates[1].name}.")


def load_mnist(data: Path | None) -> Dataset:
    """MNIST, or any dataset stored under its file names: uint8[..., height, width, 1]."""
    folder = require_folder(data, "mnist", CONTENTS)

    def images(part: str) -> np.ndarray:
        return read_idx(_find(folder, f"{part}-images-idx3-ubyte"), 3)[..., None]

    def labels(part: str) -> np.ndarray:
        path = _find(folder, f"{part}-labels-idx1-ubyte")
        actual = read_idx(path, 1)
        if actual.max(initial=0) > 9:
            raise ExperimentError(f"{path} holds the label {actual.max()}; labels are 0 to 9.")
        return actual.astype(np.int32)

    dataset = Dataset(images("train"), labels("train"), images("t10k"), labels("t10k"))
    if dataset.train_inputs.shape[1:] != dataset.test_inputs.shape[1:]:
        raise ExperimentError(f"{folder} holds training and test images of different sizes.")
    return require_examples(dataset, folder)
