"""Text as words: each word is predicted from the words before it."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import MAX_PARSED_BYTES, Dataset, read_text

CONTEXT = 4
VOCABULARY = 5000
UNKNOWN = 0
TEST_FRACTION = 0.1

# A word keeps its case and the marks inside it, as in `don't`, `built-in` and `os.path`. Adjacent
# marks, as `**` and `->`, are one word. With finer words, Python's text would have fewer than the
# default vocabulary of 5,000.
_WORD = re.compile(r"\w+(?:[.'’-]\w+)*|[^\w\s]+")


def split_words(text: str) -> list[str]:
    """The words and punctuation marks of a text, in order."""
    return _WORD.findall(text)


def _numbers(words: list[str], trained: list[str], size: int, where: object) -> np.ndarray:
    """Each word's rank by frequency in the training set, from 1; `UNKNOWN` above `size`."""
    counts = Counter(trained)
    if len(counts) < size:
        raise ExperimentError(
            f"{where} has {len(counts)} distinct words in its training set, fewer than the "
            f"vocabulary of {size}: use a longer text or a smaller --vocabulary."
        )
    ranks = {word: rank for rank, (word, _) in enumerate(counts.most_common(size), 1)}
    return np.array([ranks.get(word, UNKNOWN) for word in words], np.int32)


def load_words(data: Path | None, vocabulary: int = VOCABULARY) -> Dataset:
    """Windows of 4 words, int32[examples, 4], and the next word, int32[examples].

    Words are numbered by their frequency in the first nine tenths of the text, the training set; 0
    is any word that is not among the `vocabulary` most frequent. The last tenth is the test set.

    Args:
      data: Any plain-text file in UTF-8. Default: see `read_text`.
      vocabulary: The number of words with a distinct number.

    Raises:
      ExperimentError: If the file is missing, too large or not text, or has fewer distinct words.
    """
    try:
        text = read_text(data, "words", MAX_PARSED_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{data} is not UTF-8 text: {error.reason}.") from error
    words = split_words(text)
    test = round(TEST_FRACTION * len(words))
    if test <= CONTEXT:
        raise ExperimentError(
            f"{data} holds {len(words)} words; at least {10 * (CONTEXT + 1)} are needed."
        )
    numbers = _numbers(words, words[:-test], vocabulary, data or "the text of Python's help()")

    def windows(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.lib.stride_tricks.sliding_window_view(part[:-1], CONTEXT)
        return np.ascontiguousarray(inputs), part[CONTEXT:]

    return Dataset(*windows(numbers[:-test]), *windows(numbers[-test:]), sizes=(vocabulary + 1,))
