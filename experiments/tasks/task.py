"""A training task: a network, a dataset, initial weights, batches and scores."""

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from experiments.errors import ExperimentError
from experiments.tasks.data import hold_out, load
from experiments.tasks.models import MODELS
from experiments.tasks.partitions import orders

EVALUATION_CHUNK = 2000

Batch = tuple[np.ndarray, np.ndarray]


@jax.jit(static_argnames="model")
def _first_weights(seed: int, inputs: jax.Array, model: linen.Module) -> Any:
    return model.init(jax.random.key(seed), inputs)["params"]


@jax.jit(static_argnames="model")
def _sums(
    params: Any, inputs: jax.Array, labels: jax.Array, model: linen.Module
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropies, and the number of correct predictions."""
    logits = model.apply({"params": params}, inputs)
    return jnp.sum(cross_entropy(logits, labels)), jnp.sum(jnp.argmax(logits, axis=-1) == labels)


class Task:
    """A network and its dataset, the same for all compared methods."""

    def __init__(
        self,
        dataset: str,
        data: str | None = None,
        *,
        scored_examples: int | None = None,
        **options: int,
    ):
        """Reads the data.

        Args:
          dataset: The name of the dataset.
          data: The folder or file of the dataset.
          scored_examples: The number of training examples, evenly spaced, of the training score;
            `None` is all.
          **options: Further options of the reader of the dataset.
        """
        self.dataset = load(dataset, data, **options)
        self.model = MODELS[dataset](self.dataset)
        self._scored_examples = scored_examples

    def hold_out(self, batch: int = 1) -> "Task":
        """The task with a fifth of the training set held out, which replaces the test set.

        For choices of hyperparameters, which must not use the test set.

        Args:
          batch: The examples of a batch.

        Raises:
          ExperimentError: If a batch is larger than the rest of the training set.
        """
        held_out = copy.copy(self)
        held_out.dataset = hold_out(self.dataset)
        if batch > (rest := len(held_out.dataset.train_inputs)):
            raise ExperimentError(
                f"--batch {batch} exceeds the {rest} training examples that remain without the "
                "validation set."
            )
        return held_out

    def first_weights(self, seed: int) -> Any:
        """The initial parameters, which depend only on the seed."""
        return _first_weights(seed, self.dataset.train_inputs[:1], self.model)

    def batches(
        self, seed: int, size: int, rows: np.ndarray | slice = slice(None)
    ) -> Iterator[Batch]:
        """Infinite batches in an order that depends only on the seed. No epoch is truncated.

        Args:
          seed: The seed of the order.
          size: Examples per batch.
          rows: The rows of each batch to return, by default all.

        Raises:
          ExperimentError: If a batch is larger than the training set.
        """
        inputs, labels = self.dataset.train_inputs, self.dataset.train_labels
        if size > len(inputs):
            raise ExperimentError(f"--batch {size} exceeds the {len(inputs)} training examples.")
        for order in orders([np.arange(len(inputs))], size, seed):
            yield inputs[order[rows]], labels[order[rows]]

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean loss of a batch, float32[]."""
        inputs, labels = batch
        return jnp.mean(cross_entropy(self.model.apply({"params": params}, inputs), labels))

    def _score(self, params: Any, inputs: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        # With replicated parameters, every device would do the same work.
        params = jax.device_get(params)
        loss = hits = 0.0
        for start in range(0, len(inputs), EVALUATION_CHUNK):
            chunk = slice(start, start + EVALUATION_CHUNK)
            sums = _sums(params, inputs[chunk], labels[chunk], self.model)
            loss, hits = loss + float(sums[0]), hits + float(sums[1])
        return loss / labels.size, hits / labels.size

    def train_score(self, params: Any) -> tuple[float, float]:
        """Loss and accuracy over the training set, or over `scored_examples` of it."""
        inputs, labels = self.dataset.train_inputs, self.dataset.train_labels
        every = -(-len(inputs) // (self._scored_examples or len(inputs)))
        return self._score(params, inputs[::every], labels[::every])

    def test_score(self, params: Any) -> tuple[float, float]:
        """Loss and accuracy over the whole test set."""
        return self._score(params, self.dataset.test_inputs, self.dataset.test_labels)
