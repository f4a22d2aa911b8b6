"""Trains over a timeline."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from experiments.cli.configs import Stragglers
from experiments.methods.stragglers import WORKERS, Strategy
from experiments.tasks.task import Task
from experiments.training.timeline import Link, Timeline
from jaxcomm import synchronization


def make_shards(task: Task, seed: int) -> Any:
    """Equal shards of the training set, [workers, examples, ...], without the remainder."""
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    each = len(inputs) // WORKERS
    order = np.random.default_rng(seed).permutation(len(inputs))[: each * WORKERS]
    return jax.tree.map(lambda x: x[order].reshape(WORKERS, each, *x.shape[1:]), (inputs, labels))


class Trainer:
    """The compiled steps of one strategy on one dataset, for all rates, seeds and timelines."""

    def __init__(self, task: Task, strategy: Strategy, config: Stragglers):
        """Prepares the functions without compiling them."""
        self.strategy, self.config = strategy, config
        # Gossip strategies sum over mini-batches, the others take their mean.
        self._share = 1 / config.minibatches if strategy.mixing else 1.0
        self._task = task
        self._train_chunk = jax.jit(self._chunk, donate_argnums=(1, 2))
        self._init = jax.jit(self._first)

    def _tx(self, rate: Any, seed: Any) -> Any:
        return self.strategy.build(self._share * rate, seed, self.config.period)

    def _first(self, rate: Any, seed: Any, weights: Any) -> Any:
        params = jaxcomm.replicate(weights, WORKERS) if self.strategy.per_worker_params else weights
        state = jaxcomm.init(self._tx(rate, seed), params, WORKERS)
        stale_params = self._of_workers(params) if self.strategy.finishes_late else ()
        return params, state, stale_params

    def _of_workers(self, params: Any) -> Any:
        if self.strategy.per_worker_params:
            return params.per_worker["data"]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), params)

    def _chunk(
        self, rate: Any, params: Any, carried: Any, shards: Any, key: Any, steps: Any
    ) -> Any:
        step = jaxcomm.simulate(
            self._task.loss,
            self._tx(rate, 0),
            WORKERS,
            gradients=synchronization.window_gradients,
        )

        def body(carry: Any, of_step: Any) -> Any:
            (params, state, stale_params), (window, queue) = carry, of_step
            batch = synchronization.window_batches(
                key,
                shards,
                window.first,
                minibatches=self.strategy.minibatches(self.config),
                batch_size=self.config.minibatch_size,
            )
            finishes_late = (stale_params,) if self.strategy.finishes_late else ()
            new, state, _ = step(params, state, (batch, window.finished, *finishes_late))
            if self.strategy.finishes_late:
                points = self._of_workers(params), self._of_workers(new)
                stale_params = synchronization.stale_params(window, queue, stale_params, *points)
            return (new, state, stale_params), None

        return jax.lax.scan(body, (params, *carried), steps)[0]

    def link(self, weights: Any) -> Link:
        """The seconds of communication in a step: of all leaves together, as XLA combines them.

        Scalars are excluded: they are metrics, and the count, which XLA could combine with leaves.
        """
        bandwidth, latency = self.config.bandwidth, self.config.latency
        tx = self._tx(0.1, 0)
        params = jaxcomm.replicate(weights, WORKERS) if self.strategy.per_worker_params else weights
        step = jaxcomm.simulate(lambda w, x: sum(map(jnp.sum, jax.tree.leaves(w))), tx, WORKERS)
        state = jaxcomm.init(tx, params, WORKERS)
        sent = jaxcomm.wire.account(step, params, state, jnp.zeros(WORKERS)).collectives
        reduced = [c for c in sent if c.shape and c.primitive == "all_reduce"]
        messages = [c for c in sent if c.shape and c.primitive == "ppermute"]

        def seconds(messages: int, sizes: list[float]) -> float:
            return messages * latency + sum(sizes) / bandwidth if sizes else 0.0

        return Link(
            seconds(2 * (WORKERS - 1), [c.bytes_per_worker for c in reduced]),
            seconds(1, [max(c.bytes_per_worker for c in messages)] if messages else []),
        )

    def train(self, timeline: Timeline, rate: float, seed: int) -> Iterator[tuple[int, Any]]:
        """Trains once; yields the step and the mean of the workers' parameters after each chunk."""
        params, *carried = self._init(rate, seed, self._task.first_weights(seed))
        shards, key = make_shards(self._task, seed), jax.random.key(seed)
        chunk = self.strategy.chunk(self.config)
        for start in range(0, len(timeline.seconds), chunk):
            window, queue = jax.tree.map(
                lambda x, start=start: x[start : start + chunk], (timeline.window, timeline.queue)
            )
            params, *carried = self._train_chunk(
                rate, params, carried, shards, key, (window, queue)
            )
            yield (
                start + chunk,
                jaxcomm.consensus(params) if self.strategy.per_worker_params else params,
            )
