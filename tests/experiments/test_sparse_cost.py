"""Densities, bytes and times of sparse leaves, against counts by hand."""

import math

import jax
import numpy as np
import pytest

from experiments.methods.sparse import SPARSE_METHODS, Capacity, SparseVariant
from experiments.study.search import Axis
from experiments.tasks.task import Task
from experiments.training.densities import LeafDensity, describe, measure_densities
from experiments.training.diagnostics import read_diagnostics, update_maxima
from experiments.training.traffic import count_bytes
from experiments.training.train import make_mesh

EMBEDDING = "Embed_0/embedding"
WORKERS, ROWS, WIDTH = 8, 320, 4
CAPACITIES = {"a/b": Capacity(0.05, 0.25, 0.1, 0.3)}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    words = np.random.default_rng(0).integers(0, 300, 4000)
    path = tmp_path_factory.mktemp("words") / "text"
    path.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return Task("words", str(path), vocabulary=250)


@pytest.mark.slow
def test_densities_are_those_of_the_words_in_a_batch(task: Task) -> None:
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    batches = [(inputs[i : i + 8], labels[i : i + 8]) for i in (0, 8)]
    leaves = measure_densities(task, 2, task.first_weights(0), batches)
    by_leaf = {leaf.leaf: leaf for leaf in leaves}
    embedding = by_leaf.pop(EMBEDDING)
    parts = [batch[0].reshape(2, -1) for batch in batches]
    own = max(len(np.unique(words)) for both in parts for words in both)
    union = max(len(np.unique(both)) for both in parts)
    assert embedding.shape == (251, 64) and embedding.is_sparse
    assert (251 * embedding.worker, 251 * embedding.union) == pytest.approx((own, union))
    assert embedding.capacity[:2] == pytest.approx((1.1 * own / 251, 1.1 * union / 251))
    # Of two servers, one has the words of even numbers, 126 of them, and one the others.
    shares = [np.unique(words[words % 2 == k]) for both in parts for words in both for k in (0, 1)]
    assert 126 * embedding.worker_shard == pytest.approx(max(map(len, shares)))
    assert embedding.worker_shard <= embedding.union_shard <= 2 * embedding.union + 1 / 126
    assert by_leaf["Dense_1/bias"].union == 1 and not any(x.is_sparse for x in by_leaf.values())
    assert "in the union of the workers: `Embed_0/embedding`." in describe(leaves)
    assert LeafDensity.of(embedding._asdict()) == embedding


def test_a_leaf_is_sparse_by_its_rows() -> None:
    rows = [((9, 2), 0.5), ((9, 2), 0.51), ((9, 2), 0.0), ((9,), 0.1)]
    sparse = [LeafDensity("x", shape, *4 * [union]).is_sparse for shape, union in rows]
    assert sparse == [True, False, False, False]
    found = LeafDensity("x", (9, 2), 0.2, 0.95, 0.3, 1.0).capacity
    assert found == pytest.approx((0.22, 1, 0.33, 1))


def sent(name: str, **options: float) -> float:
    variant = SparseVariant(name, CAPACITIES).tuned(**options)
    gradients = {"a/b": jax.ShapeDtypeStruct((WORKERS, ROWS, WIDTH), np.float32)}
    return count_bytes(variant, gradients, make_mesh(WORKERS))


def test_bytes_are_those_of_the_sparse_leaves() -> None:
    ring, bitmap, flag = 2 * (WORKERS - 1) / WORKERS, 4 * math.ceil(ROWS / 32), 4
    assert sent("mean") == ring * 4 * ROWS * WIDTH
    union = 0.25 * ROWS * WIDTH
    # The bitmap is joined by owners of parts, in whole words, so that it may be padded.
    for name, cells, width in (("union", union, 4), ("s2_mean_0.25", union / 4, 4)):
        found = sent(name)
        assert ring * width * cells < found <= ring * (width * cells + bitmap + 32 + flag)
    own = 0.05 * ROWS * WIDTH
    assert (WORKERS - 1) * 4 * own < sent("all_gather") <= (WORKERS - 1) * (4 * own + 2 * 16 + flag)
    assert 3 < sent("s2_peel") / sent("s2_peel_8_bits") < 4
    assert sent("mean_bfloat16") == sent("mean") / 2 + ring * flag


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, each in SPARSE_METHODS.items() if each.grid])
def test_tuning_does_not_change_the_bytes(name: str) -> None:
    ((option, arguments),) = SPARSE_METHODS[name].grid.items()
    axis = Axis(*arguments)
    further = axis.outward(axis.values, max(axis.values))
    found = {sent(name, **{option: value}) for value in (*axis.values, *further)}
    # The number of exact values is rounded to whole coordinates.
    assert max(found) - min(found) <= 2 * 4 and sent(name) in found


def test_the_maximum_of_diagnostics_is_kept() -> None:
    first = read_diagnostics(
        {"loss": 9.0, "diagnostics/0/a/overflow": 1.0, "diagnostics/0/b/overflow": 3.0}
    )
    assert first == {"overflow": 3.0}
    seen = update_maxima({}, first) | update_maxima({}, {"unpeeled": 0.5})
    assert update_maxima(seen, {"overflow": 2.0, "density": 9.0}) == {"max_overflow": 3.0}
    assert seen == {"max_overflow": 3.0, "max_unpeeled": 0.5}
