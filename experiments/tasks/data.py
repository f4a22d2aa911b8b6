"""Datasets of installed packages, and of a text. Nothing is downloaded."""

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


def _read_text(file: Path | None) -> bytes:
    """The contents of a plain-text file, or of one in `.gz`; by default the topics of `help()`.

    The topics differ slightly between versions of Python.
    """
    if file is None:
        return "\n".join(topics.values()).encode()
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


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
TEXTS: dict[str, Callable[..., Dataset]] = {"text": load_text, "words": load_words}


def load(name: str, data: str | None = None, **options: int) -> Dataset:
    """The dataset `name`.

    Args:
      name: The name of the dataset.
      data: The file of `text` or `words`; by default the topics of Python's `help()`.
      **options: Further options of its reader.

    Raises:
      ExperimentError: If there is no such dataset, or its file is missing or malformed.
    """
    if name in INSTALLED and data is None:
        return INSTALLED[name]()
    if name not in TEXTS:
        raise ExperimentError(
            f"--dataset must be {' or '.join(INSTALLED)} without --data, or {' or '.join(TEXTS)}, "
            f"got {name!r} with {data!r}."
        )
    try:
        return TEXTS[name](data and Path(data), **options)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ExperimentError(f"--dataset {name} cannot read --data {data}: {error}.") from error
