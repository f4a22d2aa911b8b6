"""Compares gossip methods on several graphs and splits: loss of the consensus model and cost."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.cli.choices import select
from experiments.cli.configs import Gossip
from experiments.cli.errors import ExperimentError
from experiments.cli.progress import Progress
from experiments.methods.gossip import GRAPHS, METHODS, make_topology, methods_of
from experiments.studies.gossip.report import write_readme
from experiments.studies.gossip.table import claims, summarize, to_csv, to_table
from experiments.study import figures
from experiments.study.record import open_record
from experiments.tasks.partitions import orders, split
from experiments.tasks.task import Task

MIN_EXAMPLES = 32  # Per worker; a split with fewer is drawn again.


class Setting(NamedTuple):
    """A graph and a method; all their seeds and splits share a compiled program."""

    graph: str
    method: str


def settings_of(config: Gossip) -> list[Setting]:
    """The settings of the config.

    Raises:
      ExperimentError: If a graph or a method does not exist, or the batch cannot be split among the
        workers.
    """
    methods = select(config.methods, [*METHODS], "--methods")
    settings = []
    for graph in select(config.graphs, [*GRAPHS], "--graphs"):
        workers = len(make_topology(graph).graph)
        if config.batch % workers:
            raise ExperimentError(f"--batch {config.batch} is not divisible by {workers} workers.")
        settings += [Setting(graph, name) for name in methods_of(graph) if name in methods]
    if not settings:
        raise ExperimentError(f"--methods {' '.join(methods)} are not compared on any of --graphs.")
    return settings


class Trainer:
    """The compiled steps of one setting."""

    def __init__(self, task: Task, setting: Setting, learning_rate: float, batch: int):
        """Traces the step once, to count its bytes."""
        self.task, self.setting = task, setting
        self.topology = make_topology(setting.graph)
        self.workers, self.batch = len(self.topology.graph), batch
        build = METHODS[setting.method].build

        def transformation(seed: Any) -> optax.GradientTransformation:
            return optax.chain(optax.sgd(learning_rate), build(self.topology, seed))

        step = jaxcomm.simulate(task.loss, transformation(0), self.workers)
        params = jaxcomm.replicate(task.first_weights(0), self.workers)
        self._init = jax.jit(lambda seed, p: jaxcomm.init(transformation(seed), p, self.workers))
        state = self._init(0, params)
        example = task.dataset.train_inputs[:batch], task.dataset.train_labels[:batch]
        sent = [
            collective.bytes_per_worker
            for collective in jaxcomm.wire.account(step, params, state, example).collectives
            if collective.primitive == "ppermute"
        ]
        # All rounds send the same number of bytes; push-sum also sends the mass.
        self.bytes_per_round = sum(sent) / sent.count(max(sent))

        def several(params: Any, state: Any, batches: Any) -> Any:
            def body(carry: Any, batch: Any) -> Any:
                *carry, metrics = step(*carry, batch)
                return tuple(carry), metrics["diagnostics/rounds"]

            (params, state), rounds = jax.lax.scan(body, (params, state), batches)
            return params, state, jnp.sum(rounds)

        self._train_chunk = jax.jit(several, donate_argnums=(0, 1))
        self._distance = jax.jit(jaxcomm.consensus_distance)

    def train(self, kind: str, seed: int, steps: int, log_every: int) -> Iterator[dict[str, Any]]:
        """Trains once; yields a row every `log_every` steps and a summary at the end."""
        graph, method = self.setting
        run = {"graph": graph, "split": kind, "method": method, "seed": seed}
        data, each = self.task.dataset, self.batch // self.workers
        parts = split(data.train_labels, self.workers, kind, seed, min(each, MIN_EXAMPLES))
        batches = orders(parts, each, seed)
        params = jaxcomm.replicate(self.task.first_weights(seed), self.workers)
        state, rounds, done = self._init(seed, params), 0.0, 0
        while done < steps:
            examples = np.stack([*itertools.islice(batches, min(log_every, steps - done))])
            params, state, more = self._train_chunk(
                params, state, (data.train_inputs[examples], data.train_labels[examples])
            )
            rounds, done = rounds + float(more), done + len(examples)
            model = jaxcomm.consensus(params)
            loss, accuracy = self.task.train_score(model)
            spent = {"rounds": rounds, "bytes_sent": rounds * self.bytes_per_round}
            yield {
                "kind": "gossip",
                **run,
                "step": done,
                "train_loss": loss,
                "distance": float(self._distance(params)),
                **spent,
            }
        test_loss, test_accuracy = self.task.test_score(model)
        yield {
            "kind": "gossip_run",
            **run,
            "workers": self.workers,
            "steps": steps,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "distance": float(self._distance(params)),
            "rounds_per_step": rounds / steps,
            "bytes_per_step": rounds * self.bytes_per_round / steps,
        }


def main(config: Gossip) -> int:
    """Runs `python -m experiments compare --preset gossip`; returns the exit code."""
    settings = settings_of(config)
    task = Task("digits")
    if config.batch > (examples := len(task.dataset.train_inputs)):
        raise ExperimentError(f"--batch {config.batch} exceeds the {examples} training examples.")
    total = len(settings) * len(config.splits) * config.seeds
    curves: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with open_record(config) as record, Progress(total) as progress:
        progress.print(f"{total} runs of {config.steps} steps")
        for setting in settings:
            trainer = Trainer(task, setting, config.learning_rate, config.batch)
            for kind in config.splits:
                began = time.perf_counter()
                for seed in range(config.seeds):
                    for row in trainer.train(kind, seed, config.steps, config.log_every):
                        record.add(row)
                        (runs if row["kind"] == "gossip_run" else curves).append(row)
                latest = summarize(runs)[-1]
                progress.advance(
                    len(runs),
                    f"{latest.graph:15}{latest.split:7}{latest.method:22} training loss "
                    f"{latest.train_loss:.4f}, test accuracy {100 * latest.test_accuracy:.1f} %, "
                    f"{latest.rounds_per_step:.2f} rounds per step, "
                    f"{time.perf_counter() - began:.0f} s",
                )
        rows, verdicts = summarize(runs), claims(curves)
        progress.print(to_table(rows))
        for verdict in verdicts:
            progress.print(verdict.sentence)
        record.write("table.csv", to_csv(rows))
        record.write("README.md", write_readme(config, rows, verdicts))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
