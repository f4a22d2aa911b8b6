"""Datasets of installed packages, and readers of standard files. Nothing is downloaded."""

import gzip
import itertools
import re
import string
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.errors import ExperimentError

SEED = 0  # Of what is the same in all runs.
VALIDATION_PART = 0.2
TEST_PART = 0.1  # Of a text.


class Dataset(NamedTuple):
    """Examples and labels. Inputs have the stored dtype; models scale them."""

    train_inputs: np.ndarray  # uint8[examples, ...], or int32 for words
    train_labels: np.ndarray  # int32[examples, ...]
    test_inputs: np.ndarray
    test_labels: np.ndarray
    words: int = 0  # The size of a vocabulary.


def hold_out(dataset: Dataset) -> Dataset:
    """Holds out a random fifth of the training set, which replaces the test set.

    The split is the same for all seeds.
    """
    inputs, labels = dataset.train_inputs, dataset.train_labels
    order = np.random.default_rng(SEED).permutation(len(inputs))
    count = round(VALIDATION_PART * len(order))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    return Dataset(inputs[train], labels[train], inputs[test], labels[test], dataset.words)


def read_bytes(path: Path) -> bytes:
    """The contents of a file, decompressed if its name ends in `.gz`."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def load_digits() -> Dataset:
    """Scikit-learn's digits: 1437 training and 360 test images, uint8[..., 8, 8, 1] from 0 to 16.

    The split is stratified and the same for all seeds.
    """
    from sklearn import datasets, model_selection  # Takes a second to load.

    images, labels = datasets.load_digits(return_X_y=True)
    train_inputs, test_inputs, train_labels, test_labels = model_selection.train_test_split(
        images.reshape(-1, 8, 8, 1).astype(np.uint8),
        labels.astype(np.int32),
        test_size=360,
        stratify=labels,
        random_state=SEED,
    )
    return Dataset(train_inputs, train_labels, test_inputs, test_labels)


SIDE = 32  # Pixels of a glyph.
CHARACTERS = string.digits + string.ascii_letters
SIZES = (18, 21, 24, 27)  # Pixels per em.
REPETITIONS = 2
LARGEST_SHIFT = 2  # Pixels.
TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
    *("cmr10", "cmb10", "cmss10", "cmti10"),
)
TEST_FONTS = ("DejaVuSansMono-Bold", "DejaVuSerif", "STIXGeneralBolIta", "cmtt10")


def load_glyphs() -> Dataset:
    """Letters and digits in the fonts that matplotlib installs, uint8[..., 32, 32, 1].

    8432 training images are in 17 fonts, and 1984 test images in 4 other cuts of their families.
    The 62 labels are the digits, then the letters. Every character is drawn twice per font in 4
    sizes, each time with a random shift of at most 2 pixels, the same for all seeds. Images differ
    slightly between versions of Pillow.
    """
    folder, rng = (
        Path(matplotlib.get_data_path(), "fonts", "ttf"),
        np.random.default_rng(SEED),
    )

    def images(fonts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        drawn = []
        for name, size in itertools.product(fonts, SIZES):
            font = ImageFont.truetype(folder / f"{name}.ttf", size)
            for character in REPETITIONS * CHARACTERS:
                x, y = SIDE // 2 + rng.integers(-LARGEST_SHIFT, LARGEST_SHIFT, 2, endpoint=True)
                image = Image.new("L", (SIDE, SIDE))
                ImageDraw.Draw(image).text((x, y), character, fill=255, font=font, anchor="mm")
                drawn.append(np.asarray(image))
        labels = np.tile(np.arange(len(CHARACTERS)), len(drawn) // len(CHARACTERS))
        return np.stack(drawn)[..., None], labels.astype(np.int32)

    return Dataset(*images(TRAIN_FONTS), *images(TEST_FONTS))


def _require_digits(labels: np.ndarray) -> np.ndarray:
    """Labels as int32. The loss of a label without a logit would be NaN."""
    if (most := labels.max()) > 9:
        raise ValueError(f"it has the label {most}; labels are 0 to 9")
    return labels.astype(np.int32)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of an IDX file, the format of MNIST, gzipped or not.

    The file has two zero bytes, a byte for the type (8: unsigned bytes), a byte for the number of
    dimensions, each dimension as a big-endian uint32, then the elements in row-major order.
    """
    raw = read_bytes(path if path.exists() else path.with_name(f"{path.name}.gz"))
    if raw[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path} is not an IDX file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(*shape)


def load_mnist(folder: Path) -> Dataset:
    """MNIST, or any dataset stored under its file names: uint8[..., height, width, 1]."""

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        images = _read_idx(folder / f"{part}-images-idx3-ubyte", 3)[..., None]
        return images, _require_digits(_read_idx(folder / f"{part}-labels-idx1-ubyte", 1))

    return Dataset(*read("train"), *read("t10k"))


def load_cifar10(folder: Path) -> Dataset:
    """CIFAR-10, binary version: a byte of label, then 3 x 32 x 32 bytes of red, green and blue."""

    def read(*names: str) -> tuple[np.ndarray, np.ndarray]:
        raw = b"".join(read_bytes(folder / f"{name}.bin") for name in names)
        records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return images, _require_digits(records[:, 0])

    return Dataset(*read(*(f"data_batch_{n}" for n in range(1, 6))), *read("test_batch"))


def _read_text(file: Path | None) -> bytes:
    """The contents of a plain-text file; by default the topics of Python's `help()`.

    The topics differ slightly between versions of Python.
    """
    return read_bytes(file) if file else "\n".join(topics.values()).encode()


def load_text(file: Path | None, window: int = 64) -> Dataset:
    """Windows of bytes, and the next bytes as labels. The last tenth is the test set."""
    raw = np.frombuffer(_read_text(file), np.uint8)
    windows = (len(raw) - 1) // window
    test = max(1, round(windows * TEST_PART))
    inputs = raw[: windows * window].reshape(windows, window)
    labels = raw[1 : windows * window + 1].reshape(windows, window).astype(np.int32)
    return Dataset(inputs[:-test], labels[:-test], inputs[-test:], labels[-test:])


CONTEXT = 4  # Words from which the next one is predicted.

# A word keeps its case and the marks inside it, as in `don't`, `built-in` and `os.path`. Adjacent
# marks, as `**` and `->`, are one word. With finer words, Python's text would have fewer than the
# default vocabulary of 5,000.
WORD = re.compile(r"\w+(?:[.'’-]\w+)*|[^\w\s]+")


def load_words(file: Path | None, vocabulary: int = 5000) -> Dataset:
    """Windows of 4 words, int32[examples, 4], and the next word, int32[examples].

    Words are numbered by their frequency in the first nine tenths of the text, the training set; 0
    is any word that is not among the `vocabulary` most frequent. The last tenth is the test set.
    """
    words = WORD.findall(_read_text(file).decode())
    test = round(TEST_PART * len(words))
    counts = Counter(words[:-test])
    if len(counts) < vocabulary:
        raise ValueError(
            f"its training set has {len(counts)} distinct words, fewer than the vocabulary of "
            f"{vocabulary}: use a longer text or a smaller --vocabulary"
        )
    ranks = {word: rank for rank, (word, _) in enumerate(counts.most_common(vocabulary), 1)}
    numbers = np.array([ranks.get(word, 0) for word in words], np.int32)

    def windows(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.lib.stride_tricks.sliding_window_view(part[:-1], CONTEXT)
        return np.ascontiguousarray(inputs), part[CONTEXT:]

    return Dataset(*windows(numbers[:-test]), *windows(numbers[-test:]), vocabulary + 1)


INSTALLED: dict[str, Callable[[], Dataset]] = {"digits": load_digits, "glyphs": load_glyphs}
READERS: dict[str, Callable[..., Dataset]] = {
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "text": load_text,
    "words": load_words,
}


def load(name: str, data: str | None, **options: int) -> Dataset:
    """The dataset `name`.

    Args:
      name: The name of the dataset.
      data: The folder of `mnist` or `cifar10`, or the file; `None` for installed datasets.
      **options: Further options of its reader.

    Raises:
      ExperimentError: If there is no such dataset, or its files are missing or malformed.
    """
    if name in INSTALLED and data is None:
        return INSTALLED[name]()
    if name not in READERS or (data is None and name not in ("text", "words")):
        raise ExperimentError(
            f"--dataset must be {' or '.join(INSTALLED)} without --data, or {', '.join(READERS)} "
            f"with --data, got {name!r} with {data!r}."
        )
    try:
        dataset = READERS[name](data and Path(data), **options)
        if len(dataset.train_inputs) != len(dataset.train_labels):
            raise ValueError("it has another number of inputs than of labels")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ExperimentError(f"--dataset {name} cannot read --data {data}: {error}.") from error
    return dataset
