"""Readers of words and ratings, and the losses of their networks."""

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.tasks.data import hold_out, load
from experiments.tasks.data.words import CONTEXT, split_words
from experiments.tasks.task import Task

WORDS = [f"w{(i * i) % 37}" for i in range(400)]
RATINGS = [(10 + i % 7, 500 - i % 11, 1 + i % 5, 880_000_000 + i) for i in range(200)]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def ratings(tmp_path: Path) -> str:
    return write(tmp_path / "u.data", "".join("\t".join(map(str, r)) + "\n" for r in RATINGS))


def test_words_keep_their_inner_marks() -> None:
    text = "Don't split built-in os.path; x -> **y, _z2 end."
    expected = ["Don't", "split", "built-in", "os.path", ";", "x", "->", "**", "y", ",", "_z2"]
    assert split_words(text) == [*expected, "end", "."]


def test_words_are_numbered_by_frequency_and_predicted_from_four(tmp_path: Path) -> None:
    dataset = load("words", write(tmp_path / "text", " ".join(WORDS)), vocabulary=10)
    trained, tested = WORDS[:360], WORDS[360:]
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
    assert dataset.sizes == (11,) == hold_out(dataset).sizes
    assert (dataset.train_labels == 0).any()


def test_the_text_of_python_has_a_vocabulary_of_5000() -> None:
    dataset = load("words", None)
    assert dataset.sizes == (5001,)
    assert {*np.unique(dataset.train_inputs)} >= {*range(1, 5001)}
    assert len(dataset.train_labels) > 50_000 and len(dataset.test_labels) > 5_000


def test_ratings_are_read_and_a_tenth_held_out(ratings: str) -> None:
    dataset = load("movielens", ratings)
    assert dataset.sizes == (7, 11)
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (180, 20)
    pairs = np.add(np.concatenate([dataset.train_inputs, dataset.test_inputs]), [10, 490])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    found = sorted((*pair, label) for pair, label in zip(pairs.tolist(), labels, strict=True))
    assert found == sorted(rating[:3] for rating in RATINGS)
    np.testing.assert_array_equal(load("movielens", ratings).test_inputs, dataset.test_inputs)


@pytest.mark.parametrize(
    ("dataset", "text", "message"),
    [
        ("movielens", "", "holds no training examples"),
        ("movielens", "1\t2\t3\t4\n1 2 3 4\n", "line 2 is not user, item, rating and time"),
        ("movielens", f"1\t2\t3\t4\n1\t2\t3\t{'9' * 25}\n", "line 2 is not user"),
        ("movielens", "1\t2\t6\t4\n", "line 1 holds the rating 6; ratings are 1 to 5"),
        ("words", " ".join(WORDS), "distinct words in its training set, fewer than"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_an_error(
    tmp_path: Path, dataset: str, text: str, message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        load(dataset, write(tmp_path / "file", text))


def test_the_loss_of_ratings_is_the_squared_error(ratings: str) -> None:
    task = Task("movielens", ratings)
    params = jax.device_get(task.first_weights(0))
    params["user_bias"] = {"embedding": np.linspace(-1, 1, 7, dtype=np.float32)[:, None]}
    users, items = task.dataset.test_inputs.T
    factors = (params[name]["embedding"].astype(np.float64) for name in ("user", "item"))
    products = np.einsum("ij,ij->i", *(x[i] for x, i in zip(factors, (users, items), strict=True)))
    bias = params["user_bias"]["embedding"][users, 0].astype(np.float64)
    predicted = task.dataset.train_labels.mean() + bias + products
    loss, accuracy = task.test_score(params)
    assert loss == pytest.approx(np.square(predicted - task.dataset.test_labels).mean(), rel=1e-5)
    assert accuracy == (np.round(predicted) == task.dataset.test_labels).mean()
    batch = task.dataset.test_inputs, task.dataset.test_labels
    assert float(task.loss(params, batch)) == pytest.approx(loss, rel=1e-5)


def test_the_training_loss_is_over_the_scored_examples(ratings: str) -> None:
    whole, some = Task("movielens", ratings), Task("movielens", ratings, scored_examples=60)
    params = whole.first_weights(0)
    kept = whole.dataset.train_inputs[::3], whole.dataset.train_labels[::3]
    assert some.train_score(params)[0] == pytest.approx(float(whole.loss(params, kept)), rel=1e-5)
    assert some.train_score(params) != whole.train_score(params)
