"""Datasets: what they hold, and files that they do not read."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.tasks.data import CONTEXT, TEST_FONTS, TRAIN_FONTS, WORD, hold_out, load
from experiments.tasks.task import Task

WORDS = [f"w{(i * i) % 37}" for i in range(400)]


@pytest.mark.slow
def test_glyphs_are_of_all_characters_in_fonts_of_one_set_only() -> None:
    dataset = load("glyphs", None)
    for inputs, labels, fonts in (
        (dataset.train_inputs, dataset.train_labels, TRAIN_FONTS),
        (dataset.test_inputs, dataset.test_labels, TEST_FONTS),
    ):
        assert inputs.shape == (len(fonts) * 4 * 2 * 62, 32, 32, 1) and inputs.dtype == np.uint8
        assert (np.bincount(labels) == len(fonts) * 4 * 2).all() and labels.dtype == np.int32
        assert inputs.reshape(len(inputs), -1).max(axis=1).min() > 100  # None is empty.
    assert {*TRAIN_FONTS}.isdisjoint(TEST_FONTS)


def test_text_is_of_bytes_and_words_keep_their_inner_marks(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(i % 256 for i in range(1000)))
    dataset = load("text", str(path))
    following = (dataset.train_inputs.astype(int) + 1) % 256
    np.testing.assert_array_equal(dataset.train_labels, following)
    assert len(dataset.train_inputs) + len(dataset.test_inputs) == 999 // 64
    words = ["Don't", "built-in", "os.path", ";", "x", "->", "y", ",", "_z2", "."]
    assert WORD.findall("Don't built-in os.path; x->y, _z2.") == words


def test_words_are_numbered_by_frequency_and_predicted_from_four(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(" ".join(WORDS).encode()))
    dataset = load("words", str(path), vocabulary=10)
    trained, tested = WORDS[:360], WORDS[360:]  # Nine tenths, and one.
    ordered = sorted(set(trained), key=lambda word: (-trained.count(word), trained.index(word)))
    numbers = {word: number for number, word in enumerate(ordered[:10], 1)}
    for words, inputs, labels in (
        (trained, dataset.train_inputs, dataset.train_labels),
        (tested, dataset.test_inputs, dataset.test_labels),
    ):
        assert inputs.shape == (len(words) - CONTEXT, CONTEXT) and inputs.dtype == np.int32
        for i in (0, 7, len(labels) - 1):
            window = [numbers.get(word, 0) for word in words[i : i + CONTEXT + 1]]
            assert [*inputs[i], labels[i]] == window
    assert dataset.words == 11 == hold_out(dataset).words
    assert (dataset.train_labels == 0).any()


@pytest.mark.parametrize(
    ("dataset", "data", "message"),
    [
        ("digits", "file", "must be digits or glyphs without --data"),
        ("pictures", None, "or text or words, got 'pictures' with None"),
        ("words", "nowhere", "cannot read --data nowhere: .*No such file"),
    ],
)
def test_data_that_a_dataset_does_not_have(dataset: str, data: str | None, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load(dataset, data)


def test_scores_are_means_over_the_examples() -> None:
    whole, some = Task("digits"), Task("digits", scored_examples=480)
    params = whole.first_weights(0)
    kept = whole.dataset.train_inputs[::3], whole.dataset.train_labels[::3]
    loss, accuracy = some.train_score(params)
    assert loss == pytest.approx(float(whole.loss(params, kept)), rel=1e-5)
    logits = np.asarray(whole.model.apply({"params": params}, kept[0]), np.float64)
    right = np.take_along_axis(logits, kept[1][:, None], axis=1)[:, 0]
    assert loss == pytest.approx(np.mean(np.log(np.exp(logits).sum(axis=1)) - right), rel=1e-5)
    assert accuracy == np.mean(logits.argmax(axis=1) == kept[1])
