"""Gossip among simulated workers: the compiled steps of a method on a graph, for all runs."""

import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.gossip import GRAPHS, METHODS, make_topology, methods_of
from experiments.tasks.partitions import SKEW, orders, split
from experiments.tasks.task import Task

SHARES = (
    "The parts of the workers differ by at most one example. With skewed labels, each worker draws "
    f"the shares of its labels from Dirichlet({SKEW:g})."
)


@functools.cache
def digits() -> Task:
    """The task of all settings."""
    return Task("digits")


def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """The settings of the config of the study; successive ones share a compiled program.

    Raises:
      ExperimentError: If a graph or a method does not exist, or a number does not divide another.
    """
    methods = select(config.methods, [*METHODS], "--methods")
    graphs = select(config.graphs, GRAPHS, "--graphs")
    examples = len(digits().hold_out().dataset.train_inputs)
    if config.batch > examples:
        raise ExperimentError(
            f"--batch {config.batch} exceeds the {examples} training examples of a trial."
        )
    for graph in graphs:
        if config.batch % (workers := len(make_topology(graph).graph)):
            raise ExperimentError(f"--batch {config.batch} is not divisible by {workers} workers.")
    if config.steps % (2 * config.log_every):
        raise ExperimentError(
            f"--steps {config.steps} is not divisible by twice --log-every {config.log_every}: a "
            "trial has half the steps."
        )
    found = [
        {"graph": graph, "split": kind, "method": name}
        for graph in graphs
        for name in methods_of(graph)
        for kind in dict.fromkeys(config.splits)
        if name in methods
    ]
    if not found:
        raise ExperimentError(f"--methods {' '.join(methods)} are not compared on any of --graphs.")
    return found


class Trainer:
    """Trains a method on a graph, with any rate, split and seed."""

    def __init__(self, config: Any, setting: Mapping[str, Any]):
        """Traces the step once, to count its bytes.

        Args:
          config: The config of the study.
          setting: Has the graph and the method.
        """
        self._task, self._topology = digits(), make_topology(setting["graph"])
        self._method, self._batch = METHODS[setting["method"]], config.batch
        self._steps, self._every = config.steps, config.log_every
        self._workers = len(self._topology.graph)
        self._init = jax.jit(
            lambda seed, params: jaxcomm.init(self._tx(0.1, seed), params, self._workers)
        )
        self._advance = jax.jit(self._chunk, donate_argnums=(1,))
        self._distance = jax.jit(jaxcomm.consensus_distance)
        self._bytes_per_round = self._account()

    def _tx(self, rate: Any, seed: Any) -> optax.GradientTransformation:
        return optax.chain(optax.sgd(rate), self._method.build(self._topology, seed))

    def _step(self, rate: Any) -> Any:
        # The state has the key of the random draws, so the seed here has no effect.
        return jaxcomm.simulate(self._task.loss, self._tx(rate, 0), self._workers)

    def _account(self) -> float:
        """The bytes that a worker sends in one round of messages."""
        data = self._task.dataset
        params = jaxcomm.replicate(self._task.first_weights(0), self._workers)
        example = data.train_inputs[: self._batch], data.train_labels[: self._batch]
        account = jaxcomm.wire.account(self._step(0.1), params, self._init(0, params), example)
        sent = [
            collective.bytes_per_worker
            for collective in account.collectives
            if collective.primitive == "ppermute"
        ]
        # All rounds send the same number of bytes; push-sum also sends the mass.
        return sum(sent) / sent.count(max(sent))

    def _chunk(self, rate: jax.Array, carried: Any, batches: Any) -> Any:
        """Takes one step per batch; returns also the number of rounds of messages."""
        step = self._step(rate)

        def body(carry: Any, batch: Any) -> Any:
            *carry, metrics = step(*carry, batch)
            return tuple(carry), metrics["diagnostics/rounds"]

        carried, rounds = jax.lax.scan(body, carried, batches)
        return carried, jnp.sum(rounds)

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Mapping[str, Any], *,
        validation: bool,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Trains once; yields the logged points, and at last the results.

        Losses are of the mean of the parameters of all workers.
        """
        task = self._task.hold_out() if validation else self._task
        data, each = task.dataset, self._batch // self._workers
        parts = split(data.train_labels, self._workers, setting["split"], seed)
        batches = orders(parts, each, seed)
        params = jaxcomm.replicate(task.first_weights(seed), self._workers)
        carried, rounds = (params, self._init(seed, params)), 0.0
        steps = self._steps // 2 if validation else self._steps
        late = []
        for done in range(self._every, steps + 1, self._every):
            examples = np.stack([*itertools.islice(batches, self._every)])
            carried, more = self._advance(
                jnp.float32(parameters["learning_rate"]),
                carried,
                (data.train_inputs[examples], data.train_labels[examples]),
            )
            rounds += float(more)
            if validation:
                continue
            model = jaxcomm.consensus(carried[0])
            loss, accuracy = task.train_score(model)
            late += [loss] if done > steps / 2 else []
            distance = float(self._distance(carried[0]))
            yield {"step": done, "train_loss": loss, "distance": distance, "rounds": rounds}
        test_loss, test_accuracy = task.test_score(jaxcomm.consensus(carried[0]))
        if validation:
            yield {"validation_loss": test_loss}
            return
        expected = self._method.rounds(self._topology)
        yield {
            "workers": self._workers,
            "least_examples": min(map(len, parts)),
            "late_loss": statistics.mean(late),
            "train_loss": loss,
            "train_accuracy": accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "distance": distance,
            "rounds_per_step": rounds / steps,
            "expected_rounds": expected,
            "bytes_per_step": rounds * self._bytes_per_round / steps,
            "expected_bytes": expected * self._bytes_per_round,
        }
