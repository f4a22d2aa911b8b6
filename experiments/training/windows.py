"""Trains over a timeline."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from experiments.methods.stragglers import WORKERS, Method
from experiments.tasks.task import Task
from experiments.training.timeline import MAX_MINIBATCHES, Link, Timeline
from jaxcomm import synchronization

PADDING = 2048  # Timelines have a multiple of this length, so that they share compiled programs.


def make_shards(task: Task, seed: int, *, by_label: bool = False) -> Any:
    """Equal shards of the training set, [workers, examples, ...], without the remainder.

    Args:
      task: The task.
      seed: The seed of the order.
      by_label: Whether examples are sorted by label, so that a worker has one label or two.
    """
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    each = len(inputs) // WORKERS
    order = np.random.default_rng(seed).permutation(len(inputs))[: each * WORKERS]
    if by_label:
        order = order[np.argsort(labels[order], kind="stable")]
    return jax.tree.map(lambda x: x[order].reshape(WORKERS, each, *x.shape[1:]), (inputs, labels))


class Program:
    """The compiled steps of a method, for all forms, rates, seeds and timelines."""

    def __init__(self, task: Task, method: Method, minibatch_size: int):
        """Prepares the functions without compiling them."""
        self._task, self._method, self._size = task, method, minibatch_size
        self._advance = jax.jit(self._steps, donate_argnums=0)
        self._start = jax.jit(self._first)

    def _of_workers(self, params: Any) -> Any:
        if self._method.per_worker_params:
            return params.per_worker["data"]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), params)

    def _first(self, weights: Any, rate: Any, seed: Any, period: Any) -> Any:
        params = jaxcomm.replicate(weights, WORKERS) if self._method.per_worker_params else weights
        state = jaxcomm.init(self._method.build(rate, seed, period), params, WORKERS)
        return params, state, self._of_workers(params)

    def _steps(
        self, carry: Any, options: Any, shards: Any, steps: Any, start: Any, stop: Any
    ) -> Any:
        rate, seed, period = options
        step = jaxcomm.simulate(
            self._task.loss,
            self._method.build(rate, seed, period),
            WORKERS,
            gradients=synchronization.window_gradients,
        )

        def body(number: Any, carry: Any) -> Any:
            params, state, stale_params = carry
            window, queue = jax.tree.map(lambda x: x[number], steps)
            batch = synchronization.window_batches(
                jax.random.key(seed),
                shards,
                window.first,
                minibatches=MAX_MINIBATCHES,
                batch_size=self._size,
            )
            new, state, _ = step(params, state, (batch, window.finished, stale_params))
            points = self._of_workers(params), self._of_workers(new)
            return new, state, synchronization.stale_params(window, queue, stale_params, *points)

        return jax.lax.fori_loop(start, stop, body, carry)

    def link(self, bandwidth: float, latency: float) -> Link:
        """The seconds of communication in a step: of all leaves together, as XLA combines them.

        Scalars are excluded: they are metrics, and the count, which XLA could combine with leaves.
        """
        tx = self._method.build(0.1, 0, 1)
        params, state, _ = self._start(self._task.first_weights(0), 0.1, 0, 1)
        step = jaxcomm.simulate(lambda w, x: sum(map(jnp.sum, jax.tree.leaves(w))), tx, WORKERS)
        sent = jaxcomm.wire.account(step, params, state, jnp.zeros(WORKERS)).collectives
        reduced = [c for c in sent if c.shape and c.primitive == "all_reduce"]
        messages = [c for c in sent if c.shape and c.primitive == "ppermute"]

        def seconds(messages: int, sizes: list[float]) -> float:
            return messages * latency + sum(sizes) / bandwidth if sizes else 0.0

        return Link(
            seconds(2 * (WORKERS - 1), [c.bytes_per_worker for c in reduced]),
            seconds(1, [max(c.bytes_per_worker for c in messages)] if messages else []),
            latency,
        )

    def train(
        self,
        timeline: Timeline,
        stops: Sequence[int],
        shards: Any,
        rate: float,
        period: int,
        seed: int,
    ) -> Iterator[Any]:
        """Trains once; yields the mean of the workers' parameters after each number of steps."""
        options = jnp.float32(rate), jnp.int32(seed), jnp.int32(period)
        carry = self._start(self._task.first_weights(seed), *options)
        length = -(-len(timeline.seconds) // PADDING) * PADDING
        steps = jax.tree.map(
            lambda x: np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)]),
            (timeline.window, timeline.queue),
        )
        for start, stop in zip([0, *stops], stops, strict=False):
            carry = self._advance(carry, options, shards, steps, start, stop)
            yield jaxcomm.consensus(carry[0]) if self._method.per_worker_params else carry[0]
