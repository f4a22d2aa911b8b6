"""Readers of standard files, against files written here from the formats' definitions."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.tasks.data import base, load
from experiments.tasks.data.glyphs import FONTS, TEST_FONTS
from experiments.tasks.data.idx import read_idx
from jaxcomm.synchronization import recorded_times

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], np.uint8)
MNIST = {
    "train-images-idx3-ubyte": IMAGES,
    "train-labels-idx1-ubyte": LABELS,
    "t10k-images-idx3-ubyte": IMAGES[:2],
    "t10k-labels-idx1-ubyte": LABELS[:2],
}


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """Two zeros, the type, the number of dimensions, each as a big-endian word, the bytes."""
    dimensions = b"".join(struct.pack(">I", size) for size in array.shape)
    return bytes([0, 0, kind, array.ndim]) + dimensions + array.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    for name, array in MNIST.items():
        (tmp_path / name).write_bytes(idx(array))
    (tmp_path / "t10k-images-idx3-ubyte").unlink()  # Packed, as the files are published.
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES[:2])))
    return tmp_path


def test_mnist_is_read(mnist: Path) -> None:
    dataset = load("mnist", str(mnist))
    np.testing.assert_array_equal(dataset.train_inputs, IMAGES[..., None])
    np.testing.assert_array_equal(dataset.train_labels, [7, 0, 9])
    np.testing.assert_array_equal(dataset.test_inputs, IMAGES[:2, ..., None])
    assert dataset.train_inputs.dtype == np.uint8 and dataset.train_labels.dtype == np.int32


@pytest.mark.slow
def test_glyphs_are_of_all_characters_in_fonts_of_one_set_only() -> None:
    dataset = load("glyphs", None)
    for inputs, labels, fonts in (
        (dataset.train_inputs, dataset.train_labels, len(FONTS) - len(TEST_FONTS)),
        (dataset.test_inputs, dataset.test_labels, len(TEST_FONTS)),
    ):
        assert inputs.shape == (fonts * 4 * 2 * 62, 32, 32, 1) and inputs.dtype == np.uint8
        assert (np.bincount(labels) == fonts * 4 * 2).all() and labels.dtype == np.int32
        assert inputs.reshape(len(inputs), -1).max(axis=1).min() > 100  # None is empty.
    assert set(TEST_FONTS) < set(FONTS) and len(set(FONTS)) == 21
    np.testing.assert_array_equal(load("glyphs", None).test_inputs, dataset.test_inputs)


def test_an_idx_file_of_floats_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(IMAGES, kind=13)))
    with pytest.raises(ExperimentError, match="starts with 00000d03, not 00000803"):
        read_idx(path, 3)


def test_files_that_do_not_fit_are_an_error(mnist: Path) -> None:
    for array, message in (
        (LABELS[:2], "3 training inputs but 2 labels"),
        (LABELS + np.uint8(1), "holds the label 10"),
    ):
        (mnist / "train-labels-idx1-ubyte").write_bytes(idx(array))
        with pytest.raises(ExperimentError, match=message):
            load("mnist", str(mnist))


def cifar(folder: Path, label: int = 0) -> None:
    for number, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        red, green, blue = (np.full(1024, 50 * number + c, np.uint8) for c in range(3))
        red[1] = 255  # The second pixel of the first row.
        record = bytes([number + label]) + red.tobytes() + green.tobytes() + blue.tobytes()
        (folder / f"{name}.bin").write_bytes(2 * record)


def test_cifar10_is_read(tmp_path: Path) -> None:
    cifar(tmp_path)
    dataset = load("cifar10", str(tmp_path))
    assert dataset.train_inputs.shape == (10, 32, 32, 3)
    np.testing.assert_array_equal(dataset.train_labels, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    np.testing.assert_array_equal(dataset.train_inputs[2, 0, 0], [50, 51, 52])
    np.testing.assert_array_equal(dataset.train_inputs[2, 0, 1], [255, 51, 52])
    np.testing.assert_array_equal(dataset.test_labels, [5, 5])
    cifar(tmp_path, label=5)
    with pytest.raises(ExperimentError, match="holds the label 10"):
        load("cifar10", str(tmp_path))


def test_labels_of_text_are_the_next_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("text", None).train_inputs.size > 100_000
    path = tmp_path / "text"
    path.write_bytes(bytes(i % 256 for i in range(1000)))
    dataset = load("text", str(path))
    np.testing.assert_array_equal(
        dataset.train_labels, (dataset.train_inputs.astype(int) + 1) % 256
    )
    assert len(dataset.train_inputs) + len(dataset.test_inputs) == 999 // 64
    path.write_bytes(b"short")
    with pytest.raises(ExperimentError, match="5 bytes; at least 129 are needed"):
        load("text", str(path))
    monkeypatch.setattr(base, "MAX_BYTES", 4)
    with pytest.raises(ExperimentError, match="text holds more than 4 bytes"):
        load("text", str(path))


def test_a_trace_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxcomm.synchronization._stragglers.MAX_TRACE_BYTES", 8)
    path = tmp_path / "times.csv"
    path.write_text("1.0,3.0\n")
    assert recorded_times(path).means(2).tolist() == [1, 3]
    with pytest.raises(ValueError, match="more than 8 bytes"):
        recorded_times("/dev/zero")
