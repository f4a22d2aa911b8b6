"""A training task: a network, a dataset, initial weights, batches and scores."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from experiments.cli.errors import ExperimentError
from experiments.tasks.data import Dataset, hold_out, load
from experiments.tasks.losses import CROSS_ENTROPY, LOSSES, Loss
from experiments.tasks.models import MODELS
from experiments.tasks.partitions import orders

EVALUATION_CHUNK = 2000

Batch = tuple[np.ndarray, np.ndarray]


@functools.cache
def _compiled_init(model: linen.Module) -> Callable[..., Any]:
    """Compiled once for all tasks of the network."""
    return jax.jit(model.init)


@functools.cache
def _compiled_score(model: linen.Module, loss: Loss) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`(params, inputs, labels)` -> the sum of the losses and the number of correct predictions."""

    @jax.jit
    def score(params: Any, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = model.apply({"params": params}, inputs)
        return jnp.sum(loss.per_label(outputs, labels)), jnp.sum(loss.is_correct(outputs, labels))

    return score


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
        self.dataset: Dataset = load(dataset, data, **options)
        self.model = MODELS[dataset](self.dataset)
        self.loss_of = LOSSES.get(dataset, CROSS_ENTROPY)
        self._scored_examples = scored_examples
        self._score = _compiled_score(self.model, self.loss_of)
        self._first_weights = _compiled_init(self.model)

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
        return self._first_weights(jax.random.key(seed), self.dataset.train_inputs[:1])["params"]

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
        return jnp.mean(
            self.loss_of.per_label(self.model.apply({"params": params}, inputs), labels)
        )

    def _evaluate(self, params: Any, inputs: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        # With replicated parameters, every device would do the same work.
        params = jax.device_get(params)
        loss = hits = 0.0
        for start in range(0, len(inputs), EVALUATION_CHUNK):
            chunk = slice(start, start + EVALUATION_CHUNK)
            sums = self._score(params, inputs[chunk], labels[chunk])
            loss, hits = loss + float(sums[0]), hits + float(sums[1])
        return loss / labels.size, hits / labels.size

    def train_score(self, params: Any) -> tuple[float, float]:
        """Loss and accuracy over the training set, or over `scored_examples` of it."""
        inputs, labels = self.dataset.train_inputs, self.dataset.train_labels
        every = -(-len(inputs) // (self._scored_examples or len(inputs)))
        return self._evaluate(params, inputs[::every], labels[::every])

    def test_score(self, params: Any) -> tuple[float, float]:
        """Loss and accuracy over the whole test set."""
        return self._evaluate(params, self.dataset.test_inputs, self.dataset.test_labels)
