"""The model `words` of the lab, in JAX only: the next word, with an embedding of 5,000 words.

It is the model of the study `sparse`. The gradient of the embedding has a nonzero row per distinct
word of a batch.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from experiments.lab import methods
from experiments.lab.inputs import HELD_OUT, Inputs
from experiments.lab.methods import CONTROL, LabMethod, before
from experiments.methods.sparse import Capacity, SparseVariant
from experiments.tasks.task import Task

Capacities = Mapping[str, Capacity]

MODEL = "words"
EXAMPLES = 32  # per worker, as in the study `sparse`


@functools.cache
def task() -> Task:
    """The text and the model."""
    return Task("words")


def load() -> tuple[Callable[..., jax.Array], Inputs]:
    """The loss, and what training starts from and reads. A batch has windows and next words."""
    data = task().hold_out(EXAMPLES).dataset

    def batch(seed: int, worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, worker, step])
        chosen = rng.integers(0, len(data.train_inputs), EXAMPLES)
        return data.train_inputs[chosen], data.train_labels[chosen]

    def spread(inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.linspace(0, len(inputs) - 1, HELD_OUT).astype(int)
        return inputs[chosen], labels[chosen]

    test = task().dataset
    return task().loss, Inputs(
        lambda seed: jax.device_get(task().first_weights(seed)),
        batch,
        spread(test.test_inputs, test.test_labels),
        spread(data.test_inputs, data.test_labels),
    )


def find(label: str, seed: int, capacities: Capacities) -> LabMethod:
    """The method of a label of the study `sparse`, or the control."""
    if label == CONTROL:
        return methods.find(label)
    return before(lambda: SparseVariant(label, capacities).build(seed))


def batches(workers: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first batches of all workers, with a seed that no measurement has."""
    _, inputs = load()
    found = []
    for step in range(count):
        parts = [inputs.batch(1, worker, step) for worker in range(workers)]
        found.append(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts))
    return found
