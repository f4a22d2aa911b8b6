"""The study of sparse updates: densities and bytes against counts by hand, and a small run."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.sparse_methods import (
    SPARSE_METHODS,
    Capacity,
    measure_densities,
    sparse_method,
)
from experiments.studies.sparse import S2, SPARSE, Sparse
from experiments.study import run as command
from experiments.study.run import readme
from experiments.study.tuning import Values
from experiments.tasks.task import Task
from experiments.trainer import count_bytes, make_mesh
from tests.slow import slow

WORKERS, ROWS, WIDTH = 8, 320, 4
SMALL: dict[str, Any] = {
    "vocabulary": 150, "seeds": 2, "steps": 2, "batch": 8, "learning_rates": (0.1,), "trials": 1,
    "calibration_batches": 2, "devices": 2, "record": "tiny",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    words = np.random.default_rng(0).integers(0, 200, 3000)
    path = tmp_path_factory.mktemp("words") / "text"
    path.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_the_smallest_run_and_exact_methods_agree(tmp_path: Path, text: str) -> None:
    methods = ("mean", "all_gather", "union", "s2_mean_1", "s2_peel")
    config = Sparse(data=text, records=str(tmp_path), methods=methods, **SMALL)
    assert command.main(SPARSE, config) == 0
    (folder,) = tmp_path.iterdir()
    results = command.read_results(SPARSE, folder)
    assert readme(SPARSE, results) == (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / SPARSE.figures[0].file).read_bytes().startswith(b"\x89PNG")
    lines = {line.where: line for line in results.lines}
    assert [*lines] == [*methods]
    losses = {lines[name]["test_loss"].mean for name in ("mean", "all_gather", "union", "s2_peel")}
    assert max(losses) == pytest.approx(min(losses), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("all", "foo")}, "--methods must be of mean, .* or all, got 'foo'"),
        ({"vocabulary": 5000}, "fewer than the vocabulary of 5000"),
        ({"batch": 9}, "--batch 9 is not divisible by 2 workers"),
        slow({"batch": 1000}, "no leaf is sparse"),
    ],
)
def test_user_errors_leave_no_record(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        command.main(SPARSE, Sparse(data=text, records=str(tmp_path), **(SMALL | options)))
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_densities_are_those_of_the_words_in_a_batch(text: str) -> None:
    task = Task("words", text, vocabulary=150)
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    batches = [(inputs[i : i + 8], labels[i : i + 8]) for i in (0, 8)]
    leaves = measure_densities(task, 2, task.first_weights(0), batches)
    by_leaf = {leaf.leaf: leaf for leaf in leaves}
    embedding, bias = by_leaf["Embed_0/embedding"], by_leaf["Dense_1/bias"]
    parts = [batch[0].reshape(2, -1) for batch in batches]
    own = max(len(np.unique(words)) for both in parts for words in both)
    union = max(len(np.unique(both)) for both in parts)
    assert embedding.shape == (151, 64) and embedding.is_sparse
    assert (151 * embedding.worker, 151 * embedding.union) == pytest.approx((own, union))
    assert embedding.capacity[:2] == pytest.approx((1.1 * own / 151, 1.1 * union / 151))
    # Of two servers, one has the words of even numbers, 76 of them, and one the others.
    shares = [np.unique(words[words % 2 == k]) for both in parts for words in both for k in (0, 1)]
    assert 76 * embedding.worker_shard == pytest.approx(max(map(len, shares)))
    assert bias.union == 1 and not bias.is_sparse


def sent(name: str, **options: float) -> float:
    method = sparse_method(name, {"a/b": Capacity(0.05, 0.25, 0.1, 0.3)}).tuned(**options)
    gradients = {"a/b": jax.ShapeDtypeStruct((WORKERS, ROWS, WIDTH), np.float32)}
    return count_bytes(method, gradients, make_mesh(WORKERS))


def test_bytes_are_those_of_the_sparse_leaves() -> None:
    ring, bitmap, flag = 2 * (WORKERS - 1) / WORKERS, 4 * math.ceil(ROWS / 32), 4
    assert sent("mean") == ring * 4 * ROWS * WIDTH
    union = 0.25 * ROWS * WIDTH
    # The bitmap is joined by owners of parts, in whole words, so that it may be padded.
    for name, cells in (("union", union), ("s2_mean_0.25", union / 4)):
        assert ring * 4 * cells < sent(name) <= ring * (4 * cells + bitmap + 32 + flag)
    own = 0.05 * ROWS * WIDTH
    assert (WORKERS - 1) * 4 * own < sent("all_gather") <= (WORKERS - 1) * (4 * own + 2 * 16 + flag)
    assert 3 < sent("s2_peel") / sent("s2_peel_8_bits") < 4
    assert sent("mean_bfloat16") == sent("mean") / 2 + ring * flag
    assert {*S2["method"]} <= {*SPARSE_METHODS} and sent("sparcml") and sent("parallax")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, each in SPARSE_METHODS.items() if each.grid])
def test_tuning_does_not_change_the_bytes(name: str) -> None:
    ((option, arguments),) = SPARSE_METHODS[name].grid.items()
    axis = Values(*arguments)
    further = axis.beyond(axis.values, max(axis.values))
    found = {sent(name, **{option: value}) for value in (*axis.values, *further)}
    # The number of exact values is rounded to whole coordinates.
    assert max(found) - min(found) <= 2 * 4 and sent(name) in found
